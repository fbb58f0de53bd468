"""Node keys: fingerprints to enrol nodes by, and the signature of a reply.

Flower's link authenticates each request of a node, but not which node a reply in it claims to come from, and anyone who
may register a node is let in. So every reply is signed, inside its content, with the key that the node connects with.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord

from halfsilver.errors import ConfigError

# Flower has the same key sign times of day; no text that it signs begins like this.
_PURPOSE = b"halfsilver: reply of a node, version 1\n"
_ALGORITHM = ec.ECDSA(hashes.SHA256())


@lru_cache(maxsize=4096)
def public_key(data: bytes) -> ec.EllipticCurvePublicKey:
    """A node's public key, from the PEM or OpenSSH text of it."""
    load = serialization.load_pem_public_key if data.startswith(b"-----") else serialization.load_ssh_public_key
    key = load(data)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"Expected an elliptic curve key, as Flower's nodes have, got {type(key).__name__}.")
    return key


def fingerprint(data: bytes) -> str:
    """The fingerprint of a node's public key, by which the node is enrolled.

    It is the SHA-256 hash of the key in DER form (SubjectPublicKeyInfo).

    Args:
        data: The public key as PEM or OpenSSH text, an elliptic curve key as Flower's nodes have.

    Returns:
        64 lower-case hexadecimal digits.

    Raises:
        ConfigError: If it is a key of another kind.
        ValueError: If it is no key.

    Example:
        >>> from cryptography.hazmat.primitives import serialization
        >>> key = ec.generate_private_key(ec.SECP384R1()).public_key()
        >>> openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        >>> len(fingerprint(key.public_bytes(*openssh)))
        64
    """
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public_key(data).public_bytes(*form)).hexdigest()


def private_key(path: str | Path) -> ec.EllipticCurvePrivateKey:
    """The key file that the node was started with, in PEM or OpenSSH form, without a passphrase."""
    data = Path(path).read_bytes()
    ssh = b"OPENSSH" in data.partition(b"\n")[0]
    load = serialization.load_ssh_private_key if ssh else serialization.load_pem_private_key
    key = load(data, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"Expected an elliptic curve key, as Flower's nodes have, got {type(key).__name__}.")
    return key


def sign(key: ec.EllipticCurvePrivateKey, statement: bytes) -> bytes:
    return key.sign(_PURPOSE + statement, _ALGORITHM)


def signed(key: ec.EllipticCurvePublicKey, statement: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, _PURPOSE + statement, _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def statement(*, run: int, step: int, node: int, nonce: bytes, arrays: ArrayRecord) -> bytes:
    """What a node signs: these numbers, as its answer to this one request."""
    parts = [[name, a.dtype, list(a.shape), hashlib.sha256(a.data).hexdigest()] for name, a in arrays.items()]
    return json.dumps([run, step, node, nonce.hex(), parts]).encode()
