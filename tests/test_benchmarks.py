"""The benchmarks run: one cell of each, not timed."""

import importlib.util
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from vflsec.testing.federations import make_toy_federation

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(FOLDER))  # benchmarks import each other, as when one is run


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fewer(names):
    """Return an attack's steps in an epoch, of which the job takes 200."""
    return {"steps": 30} if names == ("attacks", "mc") else {}


@pytest.mark.long
@pytest.mark.slow
def test_one_cell_of_the_digits_job(monkeypatch):
    job = load("digits_job")
    x, y = job.load()
    build = job.registry.build
    monkeypatch.setattr(job.registry, "build", lambda *names, **options: build(*names, **{**options, **fewer(names)}))
    found = job.run(x, y, 0.0, 0, full=False)
    assert found["main"] > 0.94
    assert found["test"] > 0.3
    assert job.run_alone(x, y, 0)["test"] > 0.6


@pytest.mark.long
@pytest.mark.slow
def test_one_pair_of_the_overhead(monkeypatch):
    overhead = load("overhead")
    monkeypatch.setattr(overhead, "EPOCHS", 1)
    assert all(overhead.split(defense) > 0 for defense in overhead.DEFENSES.values())
    assert overhead.joint() > 0


@pytest.mark.slow
def test_one_pair_and_one_call_of_each_defense_of_marvells_paper(monkeypatch):
    marvell = load("marvell")
    monkeypatch.setattr(marvell, "EPOCHS", 1)
    monkeypatch.setattr(marvell, "REPEATS", 1)
    assert all(marvell.training(name) > 0 for name in (None, "marvell"))
    assert all(marvell.once(call) for call in marvell.calls().values())


@pytest.mark.long
@pytest.mark.slow
def test_one_pair_of_trainings_that_run_as_one():
    from click.testing import CliRunner

    found = CliRunner().invoke(load("together").main, ["--dataset", "toy", "--seeds", "1", "--pairs", "1"])
    assert found.exit_code == 0, found.output
    assert "of 4" in found.output


@pytest.mark.long
@pytest.mark.slow
def test_one_table_of_membership(monkeypatch):
    from click.testing import CliRunner

    membership = load("membership")
    monkeypatch.setattr(membership, "JOBS", {"short": {"data": {"n_labeled": 400}, "train": {"epochs": 2}}})
    found = CliRunner().invoke(membership.main, ["--seeds", "1", "--shadows", "4"])
    assert found.exit_code == 0, found.output
    assert found.output.count("short") == 7 - 1  # with so few shadows, two of seven attacks are the same


@pytest.mark.long
@pytest.mark.slow
def test_one_setting_of_the_fit_check(monkeypatch):
    from click.testing import CliRunner

    fit_check = load("fit_check")
    monkeypatch.setattr(fit_check, "DEFENSES", ("none", "iso:lambda=25"))
    monkeypatch.setattr(fit_check, "SHARES", (1.0,))
    words = ["--seeds", "1", "--datasets", "toy", "--rows", "60,90", "--without-checkpoints"]
    found = CliRunner().invoke(fit_check.main, words)
    assert found.exit_code == 0, found.output
    assert "| passive | 4 | 0 |" in found.output
    assert found.output.count(" of 1 |") == 6


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore")  # the cluster's own
def test_one_evaluation_of_the_scale_out():
    scale_out = load("scale_out")
    small = {"dataset": "toy", "data": {"options": {"rows": 200}}, "train": {"epochs": 1}, "attacks": ["norm"]}
    small |= {"aux": {"n": 20, "folds": 0}, "seeds": 1}
    assert scale_out.seconds(1, small) > 0


def test_the_main_command_is_the_readmes():
    assert " ".join(load("main_command").COMMAND) in (FOLDER.parent / "README.md").read_text(encoding="utf-8")


# Paths of trees


@pytest.mark.parametrize(("classes", "expected"), [((0, 1, 0, 1), 1.0), ((0, 0, 1, 1), 0.5)])
def test_path_restriction_knows_a_passive_branch_that_own_columns_and_the_class_leave(classes, expected):
    """The active party splits the root. The leaves below a passive split differ in class, or not."""
    tree = load("path_restriction").Tree(
        owner=torch.tensor([-1, 0, 1, 1]),
        sides=torch.randint(2, (4000, 4), generator=torch.Generator().manual_seed(0)),
        classes=dict(enumerate(classes, 4)),
    )
    restricted, drawn = tree.attack(0)
    assert restricted == pytest.approx(expected, abs=0.05 * (expected < 1))
    assert drawn == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_active_party_is_told_every_branch_that_path_restriction_would_guess(seed):
    tree, told = load("path_restriction").grow_boosted(make_toy_federation(seed=seed, rows=600, signal="none"))
    assert (tree.owner > 0).sum() > 2
    assert told == 1
    assert max(tree.attack(seed)) < 1


# The benchmark of methods


@pytest.fixture(scope="module")
def methods():
    return load("methods")


@pytest.mark.long
def test_every_training_can_be_named_and_methods_have_as_many_trials(methods):
    for data in methods.DATA:
        for name in methods.METHODS:
            row = methods.make_row(data, name, 0, methods.LABELS)
            cells = {row.cell.with_settings(settings).key for settings in row.choices}
            assert len(cells) == len(row.choices) == methods.TRIALS, "each trial is another"


def test_gains_are_paired_by_seed(methods):
    less, more = methods.Line([0.5, 0.7, None], 0, 0), methods.Line([0.6, 0.81, 0.9], 0, 0)
    gain = methods.compare(more, less)
    assert (gain.mean, gain.n) == (pytest.approx(0.105), 2)


@pytest.mark.long
@pytest.mark.slow
def test_a_table_of_methods(methods, monkeypatch, tmp_path):
    tiny = methods.Data(
        "toy", "A federation for tests", ("train.epochs=2", "train.pretrain.epochs=1", "data.options.rows=1000")
    )
    monkeypatch.setattr(methods, "FOLDER", tmp_path)
    monkeypatch.setattr(methods, "TRIALS", 2)
    names = ("local", *methods.ORDER)
    lines = methods.compute(tiny, names, 2, jobs=1)
    contents = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    assert methods.compute(tiny, names, 2, jobs=1) == lines
    assert contents == {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}, "nothing is computed twice"
    assert all(None not in line.utilities and line.seconds > 0 for line in lines.values())
    assert lines["local"].nbytes == 0 < lines["fedsplitnn"].nbytes < lines["fedhssl-simsiam"].nbytes
    assert len(list(methods.list_rows(lines))) == len(names) + 1
    assert "fedhssl-simsiam − fedgssl-simsiam" in methods.describe_order(lines)


@pytest.mark.long
def test_every_engine_of_the_encrypted_layer_once(monkeypatch):
    job = load("paillier")
    monkeypatch.setattr(job, "ROUNDS", 1)
    monkeypatch.setattr(job, "BATCHES", 1)
    monkeypatch.setattr(job, "UNIT_SECONDS", 0.02)
    layout = job.CipherLayout(width=10, batch=16, bits=1024)
    keys = job.Keys.generate(1024)
    assert job.naive(keys.private.public_key, keys.private, 2) > 0
    subgroup = job.CipherLayout(width=10, batch=16, bits=1024, mode="subgroup")
    assert all(min(job.ours(one)) > 0 for one in (layout, subgroup))
    assert 0 < job.limit(subgroup) < job.limit(layout)
    *_, error = job.epoch(1024, "subgroup", 2)
    assert float(error) < 1e-6


# The benchmark of PrADA


@pytest.fixture(scope="module")
def prada():
    return load("prada")


def found(prada, /, **auc):
    """Made-up figures: the paper's own, but for the rows named, whose AUC is given, over five seeds."""
    rows = {}
    for name, arm in prada.ARMS.items():
        paper = arm.paper or (80.0, 45.0) * 3
        rows[name] = {
            str(positives): [
                {"auc": value, "ks": paper[2 * k + 1], "official": value, "test": value / 100, "status": "ok"}
                for value in (auc.get(name.replace("-", "_"), paper[2 * k]) + 0.01 * seed for seed in range(-2, 3))
            ]
            for k, positives in enumerate(prada.RATIOS)
        }
    return rows


def test_the_papers_own_figures_agree_with_the_paper(prada):
    page = prada.page(found(prada, no_da=82.0), 5)
    assert "66 of 66 cells" in page
    assert "| B→A | PrADA | 79.17 ±0.02 (79.17) | 44.92 ±0.00 (44.92) |" in page
    assert "| interactions help (PrADA > w/o IR) | B→A PrADA > B→A PrADA w/o IR +0.31 [+0.31, +0.31] |" in page
    # 82 without adaptation, and (79.17 + 81.08 + 81.46) / 3 with it
    assert "B→A PrADA > B→A PrADA, nothing adapted -1.43 [-1.43, -1.43]" in page


def test_what_does_not_agree_is_named(prada):
    page = prada.page(found(prada, prada=75.0), 5)
    assert "63 of 66 cells" in page
    assert "* B→A PrADA, AUC at 160: -6.46" in page


@pytest.mark.long
def test_each_row_of_table_one_is_there_and_each_training_is_another(prada):
    assert sum(bool(arm.paper) for arm in prada.ARMS.values()) == 11
    assert all(len(arm.paper) in (0, 6) for arm in prada.ARMS.values())
    keys = [
        prada.cell(arm, positives, 0, *trial).key
        for arm in prada.ARMS.values()
        for positives in prada.RATIOS
        for trial in arm.trials
    ]
    assert len(set(keys)) == len(keys)
    stages = {prada.cell(prada.ARMS[name], 160, 0).stage_key("pretrain") for name in ("prada", "learn")}
    assert len(stages) == 1, "extractors that learn on start from the same pre-training"


@pytest.mark.slow
def test_a_row_of_the_table_of_prada(prada, monkeypatch, tmp_path):
    def toy(arm, positives, seed, *more):
        settings = {
            "dataset": "toy",
            "data": {"validation": 0.2, "options": {"rows": 200 + positives, "source": 96}},
            "methods": [arm.method],
            "train": {"epochs": 2, "pretrain": {"epochs": 1}},
        }
        return prada.build_cell(prada.specs.read_training(settings), arm.method, seed)

    monkeypatch.setattr(prada, "cell", toy)
    monkeypatch.setattr(prada, "_official", lambda one: slice(None))
    monkeypatch.setattr(prada, "RATIOS", {160: 0.04})
    rows = prada.compute(["no-ir"], 2, tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("cell.json")}
    assert len(stamps) == 4, "two pre-trainings, two results"
    assert prada.compute(["no-ir"], 2, tmp_path) == rows
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("cell.json")}
    assert all(50 < record["auc"] <= 100 for record in rows["no-ir"]["160"])


@pytest.mark.long
@pytest.mark.slow
def test_the_encrypted_prada_gives_what_it_gives_in_clear(prada, monkeypatch, tmp_path):
    def toy(arm, positives, seed, *more):
        boundary = next((setting for setting in arm.settings if "boundary" in setting), "")
        settings = {
            "dataset": "toy",
            "data": {"validation": 0.2, "options": {"rows": 200, "source": 96}},
            "methods": [arm.method],
            "method": {arm.method: {"boundary": boundary.partition("=")[2] or "plain"}},
            "train": {"epochs": 1, "optimizer": "sgd", "lr": 0.01, "pretrain": {"epochs": 1}},
        }
        return prada.build_cell(prada.specs.read_training(settings), arm.method, seed)

    monkeypatch.setattr(prada, "cell", toy)
    monkeypatch.setattr(prada, "RATIOS", {160: 0.04})
    text = prada.encrypted(prada.Store(tmp_path))
    rows = [line.split(" | ") for line in text.splitlines() if " | 160 | " in line]
    assert len(rows) == 3
    assert all(row[3] == row[4] for row in rows), "six digits of AUC on few rows"
    assert all(float(row[9].rstrip(" |")) >= 0 and row[5] == "+0.000000" for row in rows)
    (tmp_path / "page").write_text(text)
    monkeypatch.setattr(prada, "ENCRYPTED", tmp_path / "page")
    assert text in prada.page(found(prada), 5)


@pytest.mark.long
@pytest.mark.slow
def test_one_step_of_the_speed_of_prada(prada, monkeypatch):
    monkeypatch.setattr(prada, "STEPS", 1)
    monkeypatch.setattr(prada, "PAIRS", 1)
    settings = {"dataset": "toy", "data": {"options": {"rows": 200, "source": 96}}, "methods": ["prada"]}
    toy = prada.build_cell(prada.specs.read_training(settings), "prada", 0)
    monkeypatch.setattr(prada, "cell", lambda *_: toy)
    assert prada.speed().count("\n| 2 |") == 1


# The benchmark of epsilon


def test_a_line_of_epsilon_holds_or_not():
    epsilon = load("epsilon")
    answer = epsilon.LabelDP(0.5)
    good = epsilon.line(answer, "two labels", epsilon.either_label(answer), 1)
    assert good.holds
    assert good.exact == pytest.approx(2.0, rel=1e-9)
    assert 1.8 < good.found < 2.0
    assert not good._replace(found=2.1).holds
    assert not good._replace(by_hand=2.01).holds


@pytest.mark.statistical
def test_epsilon_by_hand_is_what_defenses_state(monkeypatch):
    """Bounds hold with 99 % confidence whatever the number of trials, which are fewer than the page's."""
    epsilon = load("epsilon")
    for game, trials in (("opposite_gradients", 400), ("opposite_updates", 2000)):
        monkeypatch.setattr(epsilon, game, partial(getattr(epsilon, game), trials=trials))
    lines = epsilon.worst_neighbors()
    assert {one.defense for one in lines} == {"gaussian-dp", "laplace-dp", "label-dp", "dp-sgd", "ppdl"}
    assert all(one.holds for one in lines)


def test_prada_runs_the_schedules_of_the_authors_code_whatever_the_defaults():
    prada = load("prada")
    found = {name: prada.cell(prada.ARMS[name], 160, 0) for name in ("prada", "no-da", "soon", "no-ir")}
    numbers = {
        name: (m.adaptation, m.ramp_epochs, m.decay_epochs)
        for name, m in ((name, prada.build_method(one)) for name, one in found.items())
    }
    assert numbers == {"prada": (1, 600, 600), "no-da": (0, 600, 600), "soon": (1, 3, 3), "no-ir": (1, 600, 600)}


# The benchmark of noise on delta^C


def test_noise_is_recommended_only_where_it_hides_labels_and_costs_less_than_no_gradient():
    noise = load("label_noise")

    def line(name, utility, labels):
        return noise.Line(name, 0.1, [noise.Found(utility, labels), noise.Found(utility, labels)])

    without = line(None, 0.7, None)
    assert without.labels == 0.5
    dear, leaky, good = line(3.0, 0.65, 0.55), line(0.1, 0.75, 0.99), line(1.0, 0.72, 0.55)
    diverged = noise.Line(10.0, 0.1, [None, noise.Found(0.9, 0.5)])
    assert noise.conclusion([dear, leaky, diverged, without]).startswith("No noise is worth it")
    assert re.search(r"noise 1 at .* 0\.1\.", noise.conclusion([dear, leaky, good, without]))
    text = noise.page([leaky, diverged, without], 2)
    assert "| 0.1 | 0.1 | 0.750 ±0.000 | 0.990 ±0.000 |" in text
    assert "| 10 | 0.1 | 1 of 2 runs diverge | – |" in text
    assert "| no gradient | 0.1 | 0.700 ±0.000 | nothing is sent |" in text


def test_the_table_of_noise_is_on_its_page():
    noise = load("label_noise")
    page = noise.PAGE.read_text(encoding="utf-8")
    assert "\n\nnew\n\n" in noise.written("<!-- label-noise: by -->\nold\n<!-- /label-noise -->", "\nnew\n")
    rows = len(noise.RATES) * len(noise.NOISE) + 1
    block = page.partition("<!-- label-noise")[2].partition("<!-- /label-noise")[0]
    assert sum(line.startswith("| ") for line in block.splitlines()) == rows + 2  # header and rule


@pytest.mark.long
@pytest.mark.slow
def test_one_run_of_the_noise_on_gradients():
    noise = load("label_noise")
    found = noise.run("fedsplitnn", 1.0, 0.1, 0, epochs=2)
    assert found.labels > 0.75
    assert found.utility > 0.6
    assert noise.run("vertical-lr", 0.0, 0.1, 0, epochs=1).labels is None


# The benchmark of noise on scores


@pytest.fixture(scope="module")
def score_noise():
    return load("score_noise")


def test_the_job_of_the_noise_on_scores_is_the_documented_one(score_noise):
    job = score_noise.documented_job(score_noise.PAGE.read_text(encoding="utf-8"))
    assert "max_passes = 1" in job
    assert job.count("bits = 2048") == job.count("seed = 0") == 1  # which a run replaces


def test_what_follows_from_the_noise_on_scores(score_noise):
    lines = [(noise, [score_noise.Found(auc, 0.8, r2)] * 2) for noise, auc, r2 in [(0.0, 0.75, 0.8), (1.0, 0.7, 0.3)]]
    assert "R² of 0.80 or more" in score_noise.follows(lines, 0.73)
    assert "R² of 0.30 or more" in score_noise.follows(lines, 0.69)
    assert "setting is worth the run" in score_noise.follows(lines, 0.76)
    assert "| 1 | 0.700 ±0.000 | 0.800 ±0.000 | 0.300 ±0.000 |" in score_noise.text(lines, 0.73)


@pytest.mark.statistical
def test_one_run_of_the_noise_on_scores(score_noise):
    job = score_noise.documented_job(score_noise.PAGE.read_text(encoding="utf-8"))
    found = score_noise.run(job.replace('"credit-default"', '"toy"'), 3.0, 0)
    assert found.auc > 0.5
    assert found.features < 0.4


@pytest.mark.slow
def test_wide_tables_train_in_each_way(monkeypatch):
    wide_tables = load("wide_tables")
    data = wide_tables.split_dataset(wide_tables.clicks(4_000, 2_400, 4), wide_tables.DataSpec(), 0)
    assert all(own.layout.width > 1000 for own in data.parties.values())  # so that they are sparse
    monkeypatch.setattr(wide_tables.federations, "get_partition", None)  # which a measurement replaces
    assert all(len(way(data, 2)) == 2 for way in (wide_tables.vflsec, wide_tables.bare))


# The benchmark of lower bounds of epsilon


@pytest.fixture(scope="module")
def simulated():
    return load("empirical_epsilon")


@pytest.mark.long
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 2.0, 4.0, 8.0])
def test_no_bound_exceeds_epsilon_more_often_than_its_confidence_allows(simulated, epsilon):
    for bound in simulated.BOUNDS:
        found = bound.play(epsilon, 40)
        assert simulated.refuted(found, epsilon) != (
            bound.valid or epsilon == 0
        )  # where it is not offered, it is wrong


@pytest.mark.sampled
@pytest.mark.parametrize("epsilon", [2.0, 4.0, 8.0])
def test_gaussian_noise_is_shown_to_have_most_of_its_epsilon(simulated, epsilon):
    assert simulated.BOUNDS[0].play(epsilon, 40).mean() > 0.7 * epsilon


# The benchmark of intervals


@pytest.fixture(scope="module")
def coverage():
    return load("interval_coverage")


@pytest.mark.long
def test_intervals_over_seeds_and_rows_hold_the_truth_and_those_over_seeds_alone_do_not(coverage):
    found = coverage.measured(rows=300, worlds=30, seeds=10)  # more seeds show more clearly what rows add
    for name in found[0]:
        held, alone, _ = coverage.covered(found, name)
        assert held >= stats.binom.ppf(0.001, len(found), 0.95) / len(found), name
        if name in ("utility", "leak"):
            assert alone < stats.binom.ppf(0.02, len(found), 0.95) / len(found), name


@pytest.mark.long
def test_planted_leaks_are_found_where_runs_without_one_state_that_they_would_be(coverage):
    found = coverage.planted(rows=500, worlds=40, seeds=5, deviations=(0.0, 0.5, 0.7, 0.9))
    assert found[0].advantage < 0
    assert found[0].found <= stats.binom.ppf(0.999, 40, 0.05) / 40
    assert coverage.power(found) >= stats.binom.ppf(0.001, 40, 0.8) / 40


def test_stopping_when_intervals_are_narrow_costs_little_coverage(coverage):
    held, seeds = coverage.stopped(0.5, worlds=800)
    assert 10 < seeds < 30
    assert 0.9 < held < 0.955


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "seeds", "low", "high"),
    [("variants are worse", 12, -0.006, 0.0), ("one variant is much better", 6, 0.03, 0.3)],
)
def test_a_large_attack_budget_gains_and_does_not_lose(monkeypatch, world, seeds, low, high):
    budget = load("attack_budget")
    monkeypatch.setitem(budget.METRICS, "auc", budget.auc_by_ranks)
    by_tuning, by_score = np.transpose([budget.differences(budget.WORLDS[world], seed) for seed in range(seeds)])
    assert low <= by_tuning.mean() <= high
    assert by_tuning.mean() > by_score.mean() + 0.01 or by_score.mean() > 0, "the largest score picks by luck"


def test_the_quick_auc_is_the_auc():
    budget, rng = load("attack_budget"), np.random.default_rng(0)
    scores, labels = rng.integers(4, size=(50, 2)).astype(float), np.arange(50) % 2
    assert budget.auc_by_ranks(scores, labels) == pytest.approx(budget.METRICS["auc"](scores, labels))


# The benchmark of trees


@pytest.mark.long
@pytest.mark.slow
def test_federated_trees_beside_lightgbm_and_under_encryption(monkeypatch):
    pytest.importorskip("lightgbm", reason="an extra")
    trees = load("trees")
    for name, value in {"ROUNDS": 3, "DATASETS": ("credit-default",), "SIZES": (60, 90, 120), "ROWS": 150}.items():
        monkeypatch.setattr(trees, name, value)
    ((name, ours, theirs, *_, within),) = trees.utility(1)
    assert (name, within) == ("credit-default", "yes")
    assert min(float(ours), float(theirs)) > 0.7
    assert [row[0] for row in trees.speed(1)] == ["plain", "masked"]
    assert trees.Line.through([1, 2, 4], [3, 5, 9]) == pytest.approx((1, 2, 1))
    text = trees.cryptography(1024)
    assert text.count("\n| ") == 7
    assert "a tree of 150 rows takes" in text


def test_a_table_is_replaced_between_its_comments_alone(tmp_path):
    replace_table = load("pages").replace_table
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x: by b.py -->\nold\n<!-- /x -->\nc\n<!-- y: by b.py -->\nold\n<!-- /y -->\n")
    replace_table(page, "x", r"| \1 |")
    assert (
        page.read_text() == "a\n<!-- x: by b.py -->\n| \\1 |\n<!-- /x -->\nc\n<!-- y: by b.py -->\nold\n<!-- /y -->\n"
    )
    with pytest.raises(ValueError, match="expected one table 'z' in page.md, found 0"):
        replace_table(page, "z", "")


@pytest.mark.parametrize("name", ["backdoors", "exposure", "language", "long_texts", "path_restriction", "trainings"])
def test_every_page_has_the_place_of_its_table(name, tmp_path):
    benchmark = load(name)
    names = {
        "path_restriction": ["paths"],
        "language": ["table of text", "table of labels"],
        "long_texts": ["table of memory"],
    }.get(name, [name])
    page = tmp_path / "page.md"
    page.write_text(benchmark.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    for table in names:
        load("pages").replace_table(page, table, "| new |")
    assert page.read_text(encoding="utf-8").count("| new |") == len(names)


def test_the_page_on_hijacking_follows_from_its_rows_and_keeps_those_that_are_not_measured(monkeypatch, tmp_path):
    from click.testing import CliRunner

    hijacking = load("hijacking")
    text = hijacking.PAGE.read_text("utf-8")
    assert hijacking.write_page(*hijacking.read_page()) == text
    copy = tmp_path / "page.md"
    copy.write_text(text, "utf-8")
    monkeypatch.setattr(hijacking, "PAGE", copy)
    row = "| `digits` | `urvfl` | 1.000 ±0.000 | 0.100 | 0.500 | none in 7 batches, 3 of 3 seeds |"
    monkeypatch.setattr(hijacking, "make_row", lambda *_: row)
    result = CliRunner().invoke(hijacking.main, ["--only", "digits", "--attack", "urvfl", "--write"])
    assert result.exit_code == 0, result.output
    changed = [line for line in copy.read_text("utf-8").splitlines() if line not in text.splitlines()]
    assert changed[0] == row
    assert "On `digits`, `urvfl` recovers most (1.000), without an alarm" in changed[1]
    assert "does not notice it on `digits`" in changed[2]
    assert len(changed) == 3
