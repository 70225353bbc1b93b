"""An audit from start to end: open what was trained, join it with the data, attack it, store the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vflsec.audit import foreign
from vflsec.audit.evaluation import Audit, records, to_toml, with_attacks
from vflsec.audit.opening import open_subject, read_ids
from vflsec.data.partition import DataSpec
from vflsec.experiment.cell import dataset_identity
from vflsec.experiment.federation import load_dataset
from vflsec.experiment.spec import AttackSpec, AuxSpec
from vflsec.experiment.store import Store
from vflsec.experiment.training import one_thread
from vflsec.records.manifest import Manifest
from vflsec.records.schema import Record


def prepare(
    what: Path,
    data: str,
    *,
    options: Mapping[str, Any] | None = None,
    party: str | None = None,
    model: str | None = None,
    encoded: bool = False,
    train_ids: Path | None = None,
    test_ids: Path | None = None,
    aux_ids: Path | None = None,
    aux: AuxSpec | None = None,
    draws: int = 5,
    attacks: Sequence[AttackSpec] = (),
) -> Audit:
    """Return what is to be measured; nothing is attacked yet.

    Args:
        what: a transcript, weights, an ONNX model, or a table of embeddings.
        data: a TOML file with the columns of all parties and the labels, or a registered dataset.
        options: of the dataset.
        party: the adversary.
        model: ``FILE.py:FUNCTION`` that builds the bottom model of weights; it is executed.
        encoded: whether the model reads the columns as they are, not as vflsec encodes them.
        train_ids: a file with the rows that the model was trained on.
        test_ids: a file with rows that it was not trained on; by default, all others.
        aux_ids: a file with the rows whose labels the adversary knows; by default, they are drawn.
        aux: what the adversary knows otherwise.
        draws: of the auxiliary labels; with ``aux_ids`` there is one.
        attacks: to run; by default, all that the adversary can mount.

    Raises:
        UsageError: the arguments contradict each other, or the data do not fit.
        DataError: a file is damaged.
        InsufficientView: an attack cannot be mounted.
    """
    subject = open_subject(what, party, model)
    loaded = load_dataset(data, **(options or {}))
    if encoded:
        subject = replace(subject, inputs=foreign.inputs_of(loaded, subject.adversary))
    train, test, known = (read_ids(path) if path else None for path in (train_ids, test_ids, aux_ids))
    loaded, notes = foreign.with_roles(loaded, subject, train, test)
    split = foreign.split_by(loaded)
    subject = foreign.with_embeddings(replace(subject, notes=(*subject.notes, *notes)), split)
    aux = aux or AuxSpec()
    if known is not None:
        aux, draws = foreign.known_labels(aux, known, split), 1
    identity = dataset_identity(data, DataSpec(options=dict(options or {})))
    return with_attacks(Audit(subject, split, aux, draws, (data, identity), known), attacks)


def compute(audit: Audit, manifest: Manifest, store: Store) -> Iterator[Record]:
    """Yield the records that ``store`` lacks, each once it is on disk."""
    store.write_settings(to_toml(audit), manifest)
    done = store.records()
    with one_thread():
        for draw in range(audit.draws):
            for record in records(audit, draw, done):
                store.append(record)
                yield record
