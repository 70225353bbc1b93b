"""Flights: three tables that overlap as their keys do, nothing known only after departure, and joining pays."""

import hashlib
import tomllib

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from vflsec.base.errors import UsageError
from vflsec.data import CATALOGUE, bundle, flights
from vflsec.data.dataset import Card, VerticalDataset, align
from vflsec.data.partition import DataSpec, split_dataset

COLUMNS = {
    "active": {"weekday", "sched_dep_time", "sched_arr_time", "carrier", "origin", "dest", "distance"},
    "passive_1": {
        "month",
        "temp",
        "dewp",
        "humid",
        "wind_dir",
        "wind_speed",
        "wind_gust",
        "precip",
        "pressure",
        "visib",
    },
    "passive_2": {"year", "type", "manufacturer", "model", "engines", "seats", "engine"},
}


@pytest.fixture(scope="module")
def every_flight() -> VerticalDataset:
    return flights.load(rows=flights.FLIGHTS)


@pytest.fixture(scope="module")
def some_flights() -> VerticalDataset:
    return flights.load()


def test_the_card_is_complete_and_true(every_flight, some_flights):
    card = bundle.get_card("flights")
    assert set(tomllib.loads((bundle.FOLDER / "flights.toml").read_text("utf-8"))) == set(Card.__dataclass_fields__)
    assert card.license == "CC0 1.0"
    assert "personal data" in card.notes
    assert some_flights.card == card
    assert card.rows == flights.FLIGHTS == len(bundle.read_arrays("flights")["late"])
    assert card.columns == sum(len(table.frame.columns) for table in some_flights.parties)
    assert every_flight.labels.mean() == pytest.approx(0.237, abs=5e-4)
    assert f"{len(align(some_flights.parties)):,} are in all three" in card.notes
    assert CATALOGUE["flights"] == "vflsec.data.flights:load"


def test_the_sha256_on_the_card_is_that_of_the_file():
    content = (bundle.FOLDER / "flights.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == bundle.get_card("flights").sha256
    assert len(content) <= 1_000_000


def test_the_tables_hold_the_flights_whose_keys_they_know(every_flight):
    assert [len(table.frame) for table in every_flight.parties] == [327_346, 335_220, 284_170]
    assert len(align(every_flight.parties)) == 277_690
    assert (len(every_flight.labels), every_flight.labels.sum()) == (327_346, 77_630)
    ids = np.unique(np.concatenate([table.frame.index for table in every_flight.parties]))
    assert (ids.min(), ids.max()) == (0, flights.FLIGHTS - 1)
    assert every_flight.names == {"active": "airline", "passive_1": "weather", "passive_2": "registry"}


@pytest.mark.long
def test_fewer_rows_are_a_subset_of_more_with_the_same_overlap(every_flight, some_flights):
    for few, all_ in zip(some_flights.parties, every_flight.parties, strict=True):
        common = few.frame.index
        assert len(common) / len(all_.frame) == pytest.approx(40_000 / flights.FLIGHTS, rel=0.01)
        pd.testing.assert_frame_equal(few.frame, all_.frame.loc[common])
    assert some_flights.labels.equals(every_flight.labels.loc[some_flights.labels.index])
    assert len(align(some_flights.parties)) / 40_000 == pytest.approx(277_690 / flights.FLIGHTS, abs=0.005)


def test_every_party_has_its_own_row_order(some_flights):
    common = align(some_flights.parties)
    orders = [table.frame.index[table.frame.index.isin(common)] for table in some_flights.parties]
    for number, order in enumerate(orders):
        assert not order.is_monotonic_increasing
        assert not any(order.equals(other) for other in orders[number + 1 :])
    again = flights.load()
    assert all(a.frame.equals(b.frame) for a, b in zip(some_flights.parties, again.parties, strict=True))


def test_ids_tell_nothing_of_date_and_label(every_flight):
    """The source sorts by date and departure, and neighbours in time are late together."""
    labels = every_flight.labels.sort_index().to_numpy()
    share = labels.mean()
    assert (labels[1:] == labels[:-1]).mean() == pytest.approx(share**2 + (1 - share) ** 2, abs=0.005)


def test_no_column_is_known_only_after_departure(some_flights):
    after = {"dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"}
    keys = {"tailnum", "flight", "time_hour"}
    assert {table.name: set(table.frame.columns) for table in some_flights.parties} == COLUMNS
    assert not (after | keys) & {part for name in bundle.read_arrays("flights") for part in name.split(".")}


def test_categories_are_few_and_name_no_person(some_flights):
    for table in some_flights.parties:
        assert all(table.frame[name].nunique() <= 105 for name in table.categorical)
    makers = some_flights.parties[2].frame["manufacturer"].cat.categories
    assert len(makers) == 12
    assert "OTHER" in makers
    assert not any("LARRY" in maker or "GARY" in maker for maker in makers)


def test_values_are_those_of_the_source(every_flight):
    timetable, weather, planes = (table.frame for table in every_flight.parties)
    # United's 1545 to Houston on Tuesday, 1 January, at 5:15: the first flight of the source
    found = timetable[timetable["weekday"].eq("Tuesday") & timetable["sched_dep_time"].eq(5 * 60 + 15)]
    found = found[found["dest"].eq("IAH") & found["origin"].eq("EWR") & found["carrier"].eq("UA")]
    there = weather.loc[found.index.intersection(weather.index)]
    first = there.index[there["month"].eq(1) & np.isclose(there["temp"], 39.02)]
    assert len(first) == 1
    assert timetable.loc[first[0], ["sched_arr_time", "distance"]].tolist() == [8 * 60 + 19, 1400]
    assert weather.loc[first[0], ["wind_dir", "visib"]].tolist() == ["260", 10]
    assert planes.loc[first[0], ["year", "manufacturer", "model", "seats"]].tolist() == [1999, "BOEING", "737-824", 149]
    assert every_flight.labels[first[0]] == 0  # 11 minutes late
    assert weather["wind_speed"].max() < 50  # without the hour of 1,048 miles an hour


def test_the_month_is_at_one_party(some_flights):
    airline = flights.load(month="airline")
    assert [len(table.frame.columns) for table in airline.parties] == [8, 9, 7]
    month = airline.parties[0].frame["month"]
    assert "month" in airline.parties[0].categorical
    common = align(some_flights.parties)
    assert month.loc[common].equals(some_flights.parties[1].frame["month"].loc[common])
    assert set(month.cat.categories) == set(month.unique())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "expected rows between 1 and 336776, got 0"),
        ({"rows": 336_777}, "expected rows between 1 and 336776, got 336777"),
        ({"month": "registry"}, "'registry'.*airline, weather"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        flights.load(**options)


def test_joining_pays():
    split = split_dataset(flights.load(rows=20_000), DataSpec(), 0)

    def auc(*parties: str) -> float:
        train, test = (
            np.hstack([split.parties[name].features[rows] for name in parties]) for rows in ("train", "test")
        )
        model = LogisticRegression(C=0.1, max_iter=100).fit(train, split.labels["train"])
        return roc_auc_score(split.labels["test"], model.predict_proba(test)[:, 1])

    airline, weather, registry, together = *map(auc, COLUMNS), auc(*COLUMNS)
    assert together == pytest.approx(0.72, abs=0.02)
    assert together > max(airline, weather, registry) + 0.03
    assert min(airline, weather) > registry > 0.53


def test_gaps_get_an_indicator_from_training_rows(some_flights):
    split = split_dataset(some_flights, DataSpec(n_labeled=2000), 0)
    names = {party: {column.name for column in data.layout.columns} for party, data in split.parties.items()}
    assert "wind_gust (missing)" in names["passive_1"]
    assert "year (missing)" in names["passive_2"]
    assert not any("(missing)" in name for name in names["active"])
    assert all(np.isfinite(data.features["test"]).all() for data in split.parties.values())
