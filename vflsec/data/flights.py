"""Flights from New York in 2013 at an airline, a weather service and an aircraft registry: which arrive late?

The bundled arrays are four tables: flights, routes, hours of weather and planes. Loading joins each party's own.
"""

import numpy as np
import pandas as pd

from vflsec.base.checks import expect_known
from vflsec.base.errors import UsageError
from vflsec.data import bundle
from vflsec.data.dataset import PartyTable, VerticalDataset

NAME = "flights"
CLASSES = ("on time", "late")
PARTIES = {"active": "airline", "passive_1": "weather", "passive_2": "registry"}
FLIGHTS = 336_776
MISSING = "(missing)"

WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
WEATHER = ["temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib"]
PLANE = ["year", "type", "manufacturer", "model", "engines", "seats", "engine"]


def load(*, rows: int = 40_000, month: str = "weather") -> VerticalDataset:
    """Flights from New York, which arrive more than 15 minutes late? 40,000 of 336,776 rows, 3 parties.

    The airline has the labels and its timetable (7 columns), a weather service the weather at the airport in the
    scheduled hour (10), an aircraft registry the plane (7). Each table is keyed by flight and lacks some: of all
    336,776 flights, 327,346 arrive and are in the airline's table, 335,220 are in the weather service's, 284,170 in
    the registry's, and 277,690 in all three. Fewer rows keep these shares, up to chance.

    Args:
        rows: flights, drawn at random, always the same ones; fewer are a subset of more. 336776 for all: training then
            takes about five times as long.
        month: who holds the month, ``weather`` as the season of its records, or ``airline`` as a part of its timetable,
            which then predicts more without the others.

    Raises:
        UsageError: more rows than there are, or another party for the month.
    """
    expect_known(("weather", "airline"), month=month)
    if not 1 <= rows <= FLIGHTS:
        raise UsageError(f"expected rows between 1 and {FLIGHTS}, got {rows}")
    arrays = bundle.read_arrays(NAME)
    ids = bundle.shuffle_ids(NAME, FLIGHTS)  # the rows are sorted by date
    kept = ids < rows
    # A foreign key of -1 finds the last row; such flights leave that party's table below.
    flights = {name: arrays[name][kept] for name in ("late", "day", "route", "weather", "plane")}
    index = ids[kept]

    date = pd.DatetimeIndex(np.datetime64("2013-01-01") + (flights["day"] - 1).astype("timedelta64[D]"))
    months = pd.Series(pd.Categorical.from_codes(date.month - 1, pd.RangeIndex(1, 13)), index=index, name="month")
    timetable = pd.DataFrame(
        {
            "weekday": pd.Categorical.from_codes(date.day_of_week, pd.Index(WEEKDAYS)),
            "sched_dep_time": arrays["sched_dep_time"][kept],
            "sched_arr_time": arrays["sched_arr_time"][kept],
            "carrier": _get_column(arrays, "carrier", kept),
            **{name: _get_column(arrays, f"route.{name}", flights["route"]) for name in ("origin", "dest", "distance")},
        },
        index=index,
    )
    weather = pd.DataFrame({name: arrays[f"weather.{name}"][flights["weather"]] for name in WEATHER}, index=index)
    weather["wind_dir"] = _bin_directions(arrays["weather.wind_dir"])[flights["weather"]]
    planes = pd.DataFrame({name: _get_column(arrays, f"plane.{name}", flights["plane"]) for name in PLANE}, index=index)
    if month == "airline":
        timetable.insert(0, "month", months)
    else:
        weather.insert(0, "month", months)

    arrived = flights["late"] >= 0
    tables = (
        _make_table("active", timetable[arrived]),
        _make_table("passive_1", weather[flights["weather"] >= 0]),
        _make_table("passive_2", planes[flights["plane"] >= 0]),
    )
    labels = pd.Series(flights["late"][arrived], index=index[arrived], name="label", dtype="int64")
    return VerticalDataset(NAME, tables, labels, CLASSES, card=bundle.get_card(NAME), names=PARTIES)


def _make_table(party: str, frame: pd.DataFrame) -> PartyTable:
    categorical = [str(name) for name in frame if isinstance(frame[name].dtype, pd.CategoricalDtype)]
    return bundle.make_table(NAME, party, frame, categorical, impute="mean")


def _get_column(arrays: dict[str, np.ndarray], name: str, rows: np.ndarray) -> np.ndarray | pd.Categorical:
    categories = arrays.get(f"{name}.categories")
    values: np.ndarray = arrays[name][rows]
    return values if categories is None else pd.Categorical.from_codes(values, pd.Index(categories))


def _bin_directions(degrees: np.ndarray) -> pd.Categorical:
    """Return directions of the wind as categories: 10 and 360 degrees are neighbours, 0 is a calm."""
    known = np.unique(degrees[~np.isnan(degrees)])
    codes = np.where(np.isnan(degrees), len(known), np.searchsorted(known, degrees))
    return pd.Categorical.from_codes(codes, pd.Index([*known.astype(int).astype(str), MISSING]))
