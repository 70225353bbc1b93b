"""Keys: for their owner alone, never overwritten, and refused in one line where they are wrong."""

import shutil

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from vflsec.base.errors import UsageError
from vflsec.companies import identity
from vflsec.companies.identity import Identity


def test_each_side_pins_the_other_and_keys_are_private(keys):
    for role, other in ("passive", "active"), ("active", "passive"):
        assert (keys / role / "peer.pem").read_bytes() == (keys / other / "certificate.pem").read_bytes()
        assert (keys / role / "key.pem").stat().st_mode & 0o777 == 0o600
        assert (keys / role).stat().st_mode & 0o777 == 0o700
        Identity(keys / role).context(server=True)


def test_a_certificate_can_vouch_for_no_other(keys):
    found = x509.load_pem_x509_certificate((keys / "passive" / "certificate.pem").read_bytes())
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not found.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_keys_are_never_overwritten(tmp_path):
    identity.make(tmp_path / "active", "active")
    before = (tmp_path / "active" / "key.pem").read_bytes()
    for make in (lambda: identity.make_pair(tmp_path), lambda: identity.make(tmp_path / "active", "active")):
        with pytest.raises(UsageError, match="never overwritten"):
            make()
    assert (tmp_path / "active" / "key.pem").read_bytes() == before
    assert not (tmp_path / "passive").exists()


def test_two_identities_differ(keys):
    assert identity.fingerprint(keys / "passive") != identity.fingerprint(keys / "active")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda own: (own / "peer.pem").unlink(), "copy the other party's certificate.pem"),
        (lambda own: (own / "key.pem").unlink(), "vflsec party keys"),
        (lambda own: (own / "key.pem").chmod(0o640), "got mode 640"),
        (lambda own: (own / "peer.pem").write_text("no certificate"), "copy it again"),
        (lambda own: shutil.copy(own / "certificate.pem", own / "peer.pem"), "got our own"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(keys, tmp_path, spoil, said):
    own = tmp_path / "passive"
    shutil.copytree(keys / "passive", own)
    spoil(own)
    with pytest.raises(UsageError, match=said):
        Identity(own)


def test_a_key_of_another_certificate_is_refused(keys, tmp_path):
    own = tmp_path / "passive"
    shutil.copytree(keys / "passive", own)
    (own / "key.pem").write_bytes((keys / "active" / "key.pem").read_bytes())
    with pytest.raises(UsageError, match="make new ones"):
        Identity(own).context(server=False)


@pytest.mark.parametrize("server", [True, False])
def test_a_key_with_a_pass_phrase_is_refused_and_nobody_is_asked(keys, tmp_path, server):
    own = tmp_path / "passive"
    shutil.copytree(keys / "passive", own)
    key = load_pem_private_key((own / "key.pem").read_bytes(), None)
    form = Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    (own / "key.pem").write_bytes(key.private_bytes(*form))
    with pytest.raises(UsageError, match=r"key\.pem without a pass phrase"):
        Identity(own).context(server=server)


def test_where_nothing_can_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        identity.make(tmp_path / "file" / "active", "active")
