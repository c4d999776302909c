"""What config.json says of quantized weights. Pure.

Served is `quant_method` fp8 as all families publish it: e4m3 values, blocks of 128 x 128, scales of float32 or of
powers of two (`scale_fmt` ue8m0, stored as float32 or as float8_e8m0fnu), activations quantized by the server or not at
all. Which tensors are converted, their dtypes say: `modules_to_not_convert` is only compared with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from protocol.errors import ConfigError
from worker.families.base import Family
from worker.families.table import family_of

BLOCK: Final = (128, 128)
POWERS_OF_TWO: Final = "ue8m0"
SCALE_FORMATS: Final = ("", "float", POWERS_OF_TWO)
#: Dtypes, as safetensors names them, of values and of scales.
VALUES_DTYPE: Final = "F8_E4M3"
SCALE_DTYPES: Final = ("F32", "F8_E8M0")


@dataclass(frozen=True)
class Quantization:
    """Block-FP8 weights. `not_converted`: names, or ends of names, of modules that are in the model's dtype.
    `powers_of_two`: scales are, those of activations too."""

    block: tuple[int, int] = BLOCK
    not_converted: tuple[str, ...] = ()
    powers_of_two: bool = False

    def excludes(self, name: str) -> bool:
        """Whether the module of tensor `name` is listed as not converted."""
        module = name.rpartition(".")[0]
        return any(
            module == it or module.endswith(f".{it}") or module.startswith(f"{it}.") for it in self.not_converted
        )


def read_quantization(config: Mapping[str, Any], where: object) -> Quantization | None:
    """The quantization of a parsed config.json, None: none. Raises ConfigError for a form that is not served."""
    found = config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise _refusal("is no object", "quantization_config", found, where)
    method = found.get("quant_method")
    if "model_type" in config:
        require_quantizes(family_of(SimpleNamespace(**config)), f"{where}: quantization_config.quant_method", method)
    if method != "fp8":
        raise _refusal(f"method {method} is not served", "quant_method", method, where)
    if found.get("fmt", "e4m3") != "e4m3":
        raise _refusal(f"values of {found['fmt']} are not served", "fmt", found["fmt"], where)
    block = found.get("weight_block_size")
    if not isinstance(block, (list, tuple)) or tuple(block) != BLOCK:
        raise _refusal(f"blocks of {block} are not served", "weight_block_size", block, where)
    scale_format = found.get("scale_fmt") or ""
    if scale_format not in SCALE_FORMATS:
        raise _refusal(f"scales of {scale_format} are not served", "scale_fmt", scale_format, where)
    if (scheme := found.get("activation_scheme", "dynamic")) != "dynamic":
        raise _refusal(f"activations are quantized {scheme}", "activation_scheme", scheme, where)
    names = found.get("modules_to_not_convert") or found.get("ignored_layers") or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(it, str) for it in names):
        raise _refusal("is no list of names", "modules_to_not_convert", names, where)
    return Quantization(not_converted=tuple(names), powers_of_two=scale_format == POWERS_OF_TWO)


def require_quantizes(family: Family, field: str, value: object) -> None:
    """Raise ConfigError, for `value` of `field`, where quantized weights of `family` are not read."""
    if not family.quantizes:
        remedy = "use weights in bfloat16 or float32"
        raise ConfigError(f"quantized weights of {family.name} are not served", field=field, value=value, remedy=remedy)


def _refusal(message: str, name: str, value: object, where: object) -> ConfigError:
    return ConfigError(
        message,
        field=f"{where}: quantization_config.{name}",
        value=value,
        remedy="use a checkpoint in bfloat16, or in FP8 (e4m3) with scales for blocks of 128 x 128",
    )
