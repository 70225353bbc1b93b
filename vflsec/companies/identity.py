"""Who a party is on the network: a private key, a certificate, and the one certificate that it accepts."""

import ssl
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vflsec.base.errors import UsageError
from vflsec.base.files import create
from vflsec.cipher.roles.exchange import ROLES

KEY, CERTIFICATE, PEER = "key.pem", "certificate.pem", "peer.pem"


class Identity:
    """A party's key and certificate, and its peer's certificate, from ``folder``.

    Both sides pin: no authority can vouch for a third certificate, and the peer's host name plays no part.

    Args:
        folder: holds ``key.pem``, ``certificate.pem`` and ``peer.pem``.

    Raises:
        UsageError: a file is missing, is none of ours, or a key that others may read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (KEY, CERTIFICATE, PEER):
            if not (folder / name).is_file():
                raise UsageError(f"expected {folder / name}, found none: {_suggest(name)}")
        mode = (folder / KEY).stat().st_mode & 0o777
        if mode & 0o077:
            raise UsageError(f"expected {folder / KEY} readable by its owner alone, got mode {mode:o}: chmod 600 it")
        self.peer = _read_der(folder / PEER)
        if self.peer == _read_der(folder / CERTIFICATE):
            raise UsageError(f"expected the other party's certificate in {folder / PEER}, got our own: ask it for its")

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return TLS 1.3 that shows our certificate and demands the peer's.

        Raises:
            UsageError: the key does not fit the certificate, or a file cannot be read.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0  # a resumed session would show no certificate
        try:
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, self._refuse_pass_phrase)
            context.load_verify_locations(self.folder / PEER)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(
                f"expected a certificate with its key in {self.folder}, got {error}: make new ones"
            ) from None
        return context

    def _refuse_pass_phrase(self) -> str:
        """Refuse an encrypted key; OpenSSL would ask for its pass phrase on the terminal, which a service has not."""
        raise UsageError(
            f"expected {self.folder / KEY} without a pass phrase, got one with: openssl pkey -in {KEY} -out {KEY}.new "
            "takes it off"
        )


def make(folder: Path, name: str, days: int = 365) -> None:
    """Write a new private key and its self-signed certificate into ``folder``, which nobody else may read.

    Args:
        folder: made; must not hold a key yet.
        name: of the party, for people who read certificates.
        days: for which the certificate holds.

    Raises:
        UsageError: there is a key already, or the folder cannot be written.
    """
    key, now = Ed25519PrivateKey.generate(), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"vflsec {name}")])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .sign(key, None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        create(folder / KEY, private)
        create(folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM))
    except FileExistsError as error:
        raise UsageError(
            f"expected a folder without keys, found {error.filename}: keys are never overwritten"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None


def make_pair(folder: Path, days: int = 365) -> None:
    """Make the identities of both roles under ``folder``, each with the other's certificate pinned.

    Raises:
        UsageError: either has a key already; nothing is written then.
    """
    taken = next((folder / role for role in ROLES if (folder / role).exists()), None)
    if taken:
        raise UsageError(f"expected a folder without keys, found {taken}: keys are never overwritten")
    for role in ROLES:
        make(folder / role, role, days)
    for role, other in (ROLES, ROLES[::-1]):
        create(folder / role / PEER, (folder / other / CERTIFICATE).read_bytes())


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the certificate in ``folder``, as two people read it to each other."""
    return sha256(_read_der(folder / CERTIFICATE)).hexdigest()


def _read_der(path: Path) -> bytes:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)
    except (ValueError, OSError):
        raise UsageError(f"expected a certificate in {path}, got something else: copy it again") from None


def _suggest(name: str) -> str:
    if name == PEER:
        return "copy the other party's certificate.pem there"
    return "make one with vflsec party keys"
