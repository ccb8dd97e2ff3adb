"""One file a family: config -> ``DecoderSpec``. A new family is a file here and a line in ``_FAMILIES``."""

from __future__ import annotations

from outrider.engines.errors import OutriderError
from outrider.export.architectures import llama
from outrider.export.checkpoint import Checkpoint
from outrider.export.spec import DecoderSpec, check_shapes

_FAMILIES = {"llama": llama.decoder_spec, "mistral": llama.decoder_spec}


def decoder_spec(checkpoint: Checkpoint) -> DecoderSpec:
    """The checkpoint's architecture, its tensors checked to be there with the right shapes.

    Raises:
        OutriderError: an architecture or a setting that is not implemented, or a tensor missing or misshapen.
    """
    family = str(checkpoint.config.get("model_type"))
    if family not in _FAMILIES:
        raise OutriderError(
            f"{checkpoint.path}: architecture {family!r} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    try:
        spec = _FAMILIES[family](checkpoint.config)
    except KeyError as error:
        raise OutriderError(f"{checkpoint.path}: its config has no {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise OutriderError(f"{checkpoint.path}: its config has a value of the wrong kind ({error})") from error
    except OutriderError as error:
        raise OutriderError(f"{checkpoint.path}: {error}") from None
    check_shapes(spec, checkpoint)
    return spec
