"""Whether this processor multiplies bfloat16 itself: without such units a product of matrices is slower than in float32."""

from __future__ import annotations

import platform

ON_X86 = (("AMX", "_is_amx_tile_supported"), ("AVX512_BF16", "_is_avx512_bf16_supported"))


def bfloat16_units() -> str:
    """What they are called; empty: there are none that torch knows of."""
    import torch

    if platform.machine().lower() in ("x86_64", "amd64", "i686"):
        return next((name for name, has in ON_X86 if getattr(torch.cpu, has, bool)()), "")
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return "BF16" if asked is not None and asked() else ""
