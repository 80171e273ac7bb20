"""An encoder whose weights are kept beside a model: the facts that identify it, and how it is built from its file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from opencon.encoders import encoder_entry
from opencon.encoders.pretrained import PretrainedEncoder, fingerprint
from opencon.errors import DataError


@dataclass(frozen=True, kw_only=True)
class EncoderFacts:
    """All facts about an encoder, and the fingerprint of its weights."""

    name: str
    in_channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str

    @classmethod
    def of(cls, encoder: PretrainedEncoder) -> EncoderFacts:
        """The facts about an open encoder."""
        return cls(
            name=encoder.name,
            in_channels=encoder.net.in_channels,
            image_size=encoder.image_size,
            mean=tuple(encoder.mean),
            std=tuple(encoder.std),
            fingerprint=encoder.fingerprint,
        )

    def changes(self, other: EncoderFacts) -> list[str]:
        """What differs between two encoders, in words."""
        mine, theirs = asdict(self), asdict(other)
        return ["weights" if key == "fingerprint" else key for key in mine if mine[key] != theirs[key]]


def stored_encoder(path: Path, facts: EncoderFacts) -> PretrainedEncoder:
    """The encoder that the facts describe, with the weights of a safetensors file. No package with weights is needed."""
    try:
        net = encoder_entry(facts.name).build(facts.in_channels, facts.image_size)
        net.load_state_dict(safetensors.torch.load_file(path))
    except (OSError, RuntimeError, SafetensorError) as err:
        reason = str(err).splitlines()[0]
        raise DataError(
            f"the encoder {path} cannot be read ({reason}). Copy the whole folder of the model again."
        ) from err
    net.eval()
    return PretrainedEncoder(facts.name, net, facts.image_size, facts.mean, facts.std, fingerprint(net))
