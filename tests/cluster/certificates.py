"""Certificate authorities of a test cluster, what they sign, and kubeconfigs."""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=2)


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path


def new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A fresh P-256 key, written for its owner alone; never over another one."""
    key = ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return key


def write_public_key(key: ec.EllipticCurvePrivateKey, path: Path) -> Path:
    """The public half, in the form that the API server wants for service account tokens."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
    return path


def signing_request(key: ec.EllipticCurvePrivateKey, user: str, groups: Sequence[str]) -> bytes:
    """PEM of a request for a client certificate: Kubernetes reads user from CN and groups from O."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_subject(user, groups))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )


class Authority:
    """A certificate authority in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """Make the key and the self-signed certificate `ca.crt`."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.key = new_key(folder / "ca.key")
        self.name = _subject(f"{folder.name}-ca", ())
        self.pair = Pair(folder / "ca.crt", folder / "ca.key")
        usage = _usage(sign=True)
        signed = (
            self._builder(self.name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self.key, hashes.SHA256())
        )
        self.pair.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> Pair:
        """Sign a certificate for clients, and for a server of these host names and addresses, into `NAME.crt`."""
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        key = new_key(pair.key)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = (
            self._builder(_subject(user, groups), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        signed = builder.sign(self.key, hashes.SHA256())
        pair.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return pair

    def _builder(self, subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + LIFETIME)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )


def write_kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    """A kubeconfig with one cluster and one user, everything inline, readable by its owner alone."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": path.stem, "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": path.stem}}],
        "current-context": "test",
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    return path


def client_entry(certificate: bytes, key: bytes) -> dict[str, str]:
    """The user entry of a kubeconfig for a client certificate."""
    return {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)}


def cluster_entry(server: str, authority: bytes) -> dict[str, str]:
    """The cluster entry of a kubeconfig."""
    return {"server": server, "certificate-authority-data": _base64(authority)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _subject(user: str, groups: Sequence[str]) -> x509.Name:
    names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*names, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_encipherment=False, key_cert_sign=sign, crl_sign=sign, content_commitment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
