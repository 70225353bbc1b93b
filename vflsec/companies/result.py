"""What a party has at the end of a run."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from vflsec.base.errors import StoreError
from vflsec.companies.snapshots import Snapshots

RESULT = "result.json"


class PartyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run for one party; the passive party does not learn the utility.

    Attributes:
        role: ``passive`` or ``active``.
        run: identifier of the run.
        batches: number of batches trained.
        history: digest over them, equal at both parties.
        settings: the job.
        rows: digest of the row ids.
        utility: the active party's metrics of test rows by name, the headline first.
        sent: bytes sent by the process that ended the run.
        received: bytes received by it.
        files: SHA-256 of each file beside this one, by its name.
        digest: SHA-256 of all this, by which damage is noticed.
    """

    role: str
    run: str
    batches: int
    history: str
    settings: dict[str, str]
    rows: str
    utility: dict[str, float] = {}
    sent: int = 0
    received: int = 0
    files: dict[str, str] = {}
    digest: str = ""

    def sealed(self) -> PartyResult:
        """Return it with its digest."""
        content = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=sha256(content).hexdigest())


def write(snapshots: Snapshots, result: PartyResult, files: dict[str, bytes]) -> PartyResult:
    """Write ``files`` and then the result, which lists them; return it.

    Raises:
        StoreError: the disk is full, or the folder gone.
    """
    digests = {name: sha256(content).hexdigest() for name, content in files.items()}
    sealed = msgspec.structs.replace(result, files=digests).sealed()
    for name, content in files.items():
        snapshots.write(name, content)
    snapshots.write(RESULT, msgspec.json.format(msgspec.json.encode(sealed)))
    return sealed


def read(snapshots: Snapshots) -> PartyResult | None:
    """Return the result of a run that has ended, or None.

    Raises:
        StoreError: the result or a file that it lists is damaged; a file that was moved elsewhere is not.
    """
    path, found = snapshots.folder / RESULT, snapshots.read(RESULT)
    if found is None:
        return None
    try:
        result = msgspec.json.decode(found, type=PartyResult)
    except ValueError as error:  # a DecodeError, or text that is not in UTF-8
        raise StoreError(f"expected a result in {path}, got {error}: restore a copy, or choose another --out") from None
    if result.sealed() != result:
        raise StoreError(
            f"expected {path} as it was written, got other numbers: restore a copy, or choose another --out"
        )
    for name, digest in result.files.items():
        content = snapshots.read(name)
        if content is not None and sha256(content).hexdigest() != digest:
            raise StoreError(
                f"expected {path.with_name(name)} as it was written, got another: restore a copy, or move it away"
            )
    return result
