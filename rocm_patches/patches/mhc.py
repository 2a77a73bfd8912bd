"""Patches of vllm/model_executor/layers/mhc.py: which kernels mix DeepSeek-V4's residual streams. AITER's where they
pass a probe, else this bundle's where those do, else vLLM's torch code.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from rocm_patches.patches import switch
from rocm_patches.patches.prepared import forget, prepared
from rocm_patches.registry import Patch, PatchError, Target

MODULE = "vllm.model_executor.layers.mhc"
MODEL = "vllm.models.deepseek_v4.amd.model"
SWITCH = "DSV4_MHC"

# The sizes of a decode step, an odd batch and a prefill chunk: the launch geometry depends on them.
_PROBED_TOKENS = (1, 17, 256)
# fp32 sums over 4 x hidden products against torch's; a wrong kernel is off by orders of magnitude more.
_TOLERANCE = 2e-2


def aiter_is_too_old() -> bool:
    """AITER before 0.1.14 has a race in mhc_pre (https://github.com/vllm-project/vllm/pull/43950)."""
    from importlib import metadata

    for name in ("amd-aiter", "aiter"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        numbers = []
        for part in version.split("+")[0].split(".")[:3]:
            digits = "".join(c for c in part if c.isdigit())
            numbers.append(int(digits) if digits else 0)
        return tuple(numbers) < (0, 1, 14)
    return False  # built from a source tree without metadata: the probe decides


def backend_wanted() -> str:
    """DSV4_MHC: auto, aiter, kernels (this bundle's) or torch. Raises PatchError for anything else."""
    wanted = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if wanted not in ("auto", "aiter", "kernels", "torch"):
        raise PatchError(f"{SWITCH}={wanted} is none of auto, aiter, kernels, torch")
    return wanted


def probe(pre: Callable[..., Any], hidden: int, device: Any) -> str | None:
    """Run an mhc_pre on small inputs and compare with torch. None, or what is wrong with it."""
    import torch
    from vllm.model_executor.kernels.mhc import mhc_pre_torch

    generator = torch.Generator().manual_seed(0)
    fn = (torch.randn(24, 4 * hidden, generator=generator) * hidden**-0.5).to(device)
    scale = torch.ones(3, device=device)
    base = torch.randn(24, generator=generator).to(device)
    for tokens in _PROBED_TOKENS:
        residual = torch.randn(tokens, 4, hidden, generator=generator).bfloat16().to(device)
        inputs = (residual, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 20)
        try:
            got = pre(*inputs)
            error = max(
                float((a.float() - b.float()).abs().max())
                for a, b in zip(got, mhc_pre_torch(*inputs), strict=True)
            )
        except Exception as problem:  # a refused launch must cost speed, not the server
            return f"{tokens} tokens of {hidden}: {str(problem).splitlines()[0]}"
        if not error <= _TOLERANCE * max(1.0, float(residual.float().abs().max())):
            return f"{tokens} tokens of {hidden}: off by {error:.3g}"
    return None


def _tried_first(original: Callable[..., bool]) -> Callable[..., bool]:
    """AITER's kernels where they are new enough and pass a probe on this GPU; vLLM's torch ones elsewhere."""

    @functools.cache
    def usable(hidden: int, device: Any) -> bool:
        import torch
        from vllm.logger import init_logger

        logger = init_logger("vllm.rocm_patches")
        wanted = backend_wanted()
        if wanted != "auto":
            return wanted == "aiter"
        fault = "AITER is older than 0.1.14, whose mhc_pre has a race" if aiter_is_too_old() else None
        if fault := fault or probe(torch.ops.vllm.mhc_pre_aiter, hidden, device):
            logger.warning("mHC: not on AITER, whose kernel failed: %s", fault)
        return not fault

    @functools.wraps(original)
    def _aiter_mhc_supported(residual: Any, norm_weight: Any, *, supports_norm: bool) -> bool:
        if not original(residual, norm_weight, supports_norm=supports_norm):
            return False
        import torch

        # Inside torch.compile nothing may be tried; the profiling run before it has.
        if torch.compiler.is_compiling():
            return True
        return usable(residual.shape[-1], residual.device)

    return _aiter_mhc_supported


# --- this bundle's kernels --------------------------------------------------------------------------


def mixing(fn: Any, scale: Any, base: Any) -> Any:
    """The weight as the kernels read it, made at its first use and kept on the parameter."""
    from rocm_patches.kernels import mhc

    return prepared(fn, "mixing", lambda: mhc.prepare(fn.detach(), scale.detach(), base.detach()))


def pre(
    residual: Any, fn: Any, scale: Any, base: Any, rms_eps: float, hc_eps: float, _: float, __: float,
    iterations: int, *, norm_weight: Any = None, norm_eps: float = 0.0,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """vLLM's mhc_pre on our kernels: (post [.., 4, 1], comb [.., 4, 4], layer input [.., H])."""
    return fused(
        residual, fn, scale, base, rms_eps, hc_eps, iterations, norm_weight=norm_weight, norm_eps=norm_eps
    )[1:]


def fused(
    residual: Any, fn: Any, scale: Any, base: Any, rms_eps: float, hc_eps: float, iterations: int, *,
    norm_weight: Any = None, norm_eps: float = 0.0, **previous: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """A seam: (streams, post, comb, layer input) in vLLM's shapes. `previous`: layer_output, post, comb to spread."""
    from rocm_patches.kernels import mhc

    *outer, streams, hidden = residual.shape
    shapes = {"layer_output": (-1, hidden), "post": (-1, streams), "comb": (-1, streams, streams)}
    made = mhc.seam(
        residual.reshape(-1, streams, hidden),
        mixing(fn, scale, base),
        iterations=iterations,
        rms_eps=rms_eps,
        hc_eps=hc_eps,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        **{name: value.reshape(shapes[name]) for name, value in previous.items()},
    )
    return (
        made.streams.view(*outer, streams, hidden),
        made.post.view(*outer, streams, 1),
        made.comb.view(*outer, streams, streams),
        made.y.view(*outer, hidden),
    )


@functools.cache
def _wanted() -> bool:
    """Whether the operator lets our kernels mix; read once, since every seam of every layer asks."""
    return backend_wanted() in ("auto", "kernels") and switch.wanted("mhc")


@functools.cache
def _works(hidden: int, device: Any) -> bool:
    """Whether our kernels give torch's results here; tried once, before any graph is captured (the profiling run)."""
    from vllm.logger import init_logger

    if fault := probe(pre, hidden, device):
        init_logger("vllm.rocm_patches").warning("mHC: torch, slower. This bundle's kernel failed: %s", fault)
    return not fault


def _ours(residual: Any) -> bool:
    """Whether these streams are mixed by our kernels, where AITER is out of question."""
    import torch

    if not _wanted():
        return False
    streams, hidden = residual.shape[-2:]
    fits = residual.dtype == torch.bfloat16 and streams == 4 and hidden % 64 == 0 and hidden <= 16384
    return fits and not torch.compiler.is_compiling() and _works(hidden, residual.device)


def _ours_for_pre(residual: Any, pre_eps: float, sinkhorn_eps: float, post_alpha: float) -> bool:
    """The kernels have one epsilon and DeepSeek-V4's factor 2 of the post coefficients built in."""
    return pre_eps == sinkhorn_eps and post_alpha == 2.0 and _ours(residual)


def _pre_op(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_hip(
        self: Any, residual: Any, fn: Any, hc_scale: Any, hc_base: Any, rms_eps: float, hc_pre_eps: float,
        hc_sinkhorn_eps: float, hc_post_mult_value: float, sinkhorn_repeat: int, n_splits: int = 1,
        norm_weight: Any = None, norm_eps: float = 0.0,
    ) -> Any:  # fmt: skip
        from vllm.model_executor.layers import mhc as module

        aiter = module._aiter_mhc_supported(
            residual, norm_weight, supports_norm=module.HAS_AITER_MHC_PRE_NORM
        )
        if not aiter and _ours_for_pre(residual, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value):
            return pre(
                residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
                sinkhorn_repeat, norm_weight=norm_weight, norm_eps=norm_eps,
            )  # fmt: skip
        return original(
            self, residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value,
            sinkhorn_repeat, n_splits, norm_weight, norm_eps,
        )  # fmt: skip

    return forward_hip


def _fused_op(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_hip(
        self: Any, x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any, fn: Any, hc_scale: Any, hc_base: Any,
        rms_eps: float, hc_pre_eps: float, hc_sinkhorn_eps: float, hc_post_mult_value: float, sinkhorn_repeat: int,
        n_splits: int = 1, tile_n: int = 1, norm_weight: Any = None, norm_eps: float = 0.0,
    ) -> Any:  # fmt: skip
        from vllm.model_executor.layers import mhc as module

        aiter = module.HAS_AITER_MHC_FUSED and module._aiter_mhc_supported(
            residual, norm_weight, supports_norm=module.HAS_AITER_MHC_FUSED_NORM
        )
        if not aiter and _ours_for_pre(residual, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value):
            return fused(
                residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, sinkhorn_repeat, norm_weight=norm_weight,
                norm_eps=norm_eps, layer_output=x, post=post_layer_mix, comb=comb_res_mix,
            )  # fmt: skip
        return original(
            self, x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps,
            hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, n_splits, tile_n, norm_weight, norm_eps,
        )  # fmt: skip

    return forward_hip


def _post_op(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_hip(self: Any, x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any) -> Any:
        from vllm.model_executor.layers import mhc as module

        if module._aiter_mhc_supported(residual, None, supports_norm=True) or not _ours(residual):
            return original(self, x, residual, post_layer_mix, comb_res_mix)
        from rocm_patches.kernels import mhc

        streams, hidden = residual.shape[-2:]
        made = mhc.post(
            x.reshape(-1, hidden),
            residual.reshape(-1, streams, hidden),
            post_layer_mix.reshape(-1, streams),
            comb_res_mix.reshape(-1, streams, streams),
        )
        return made.view(residual.shape)

    return forward_hip


def _head_op(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_hip(
        self: Any,
        hidden_states: Any,
        hc_fn: Any,
        hc_scale: Any,
        hc_base: Any,
        rms_norm_eps: float,
        hc_eps: float,
    ) -> Any:
        if not _ours(hidden_states):
            return original(self, hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps)
        from rocm_patches.kernels import mhc

        *outer, streams, hidden = hidden_states.shape
        made = mhc.head(
            hidden_states.reshape(-1, streams, hidden),
            mixing(hc_fn, hc_scale, hc_base),
            rms_eps=rms_norm_eps,
            hc_eps=hc_eps,
        )
        return made.view(*outer, hidden)

    return forward_hip


def _fusing_layer(original: Callable[..., None]) -> Callable[..., None]:
    """Without AITER, vLLM's decoder layer calls post, pre and RMSNorm one by one; its other path has one operator."""
    ours = _wanted()  # here, so that a wrong value is told when the patch is applied

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        fits = self.hc_mult == 4 and self.hidden_size % 64 == 0 and self.hidden_size <= 16384
        if ours and fits and not self.use_fused_mhc:
            self.use_fused_mhc = self.fuse_mhc_rmsnorm = True

    return construct


def _fresh_weights(original: Callable[..., None]) -> Callable[..., None]:
    """New weights may have been loaded into the old parameters: what was made of those goes."""

    @functools.wraps(original)
    def process_weights_after_loading(self: Any) -> None:
        original(self)
        for parameter in self.parameters():
            forget(parameter)

    return process_weights_after_loading


PATCHES = (
    Patch(
        id="mhc-backend",
        title="AITER's mHC kernels are tried before they are trusted",
        symptom="`mhc_pre ... invalid configuration argument` in the first profiling run; or, with an old "
        "AITER, lower accuracy",
        cause="vLLM takes AITER's mHC whenever aiter can be imported; some builds cannot launch it on "
        "gfx942, and those before 0.1.14 have a race",
        remedy="one small run per process against torch; on failure this bundle's kernels (mhc-kernels), or vLLM's "
        f"torch code, with a warning. {SWITCH}=aiter|kernels|torch decides by hand. TileLang, wrong on gfx942, stays "
        "off as vLLM has it",
        upstream="https://github.com/ROCm/aiter/issues/4633",
        upstream_state="open; the race is fixed in AITER 0.1.14",
        drop_when="the image's AITER launches mhc_pre on every gfx942 part",
        platforms=("gfx942",),
        targets=(
            Target(MODULE, "_aiter_mhc_supported", _tried_first),
            Target(MODULE, "MHCPreOp.forward_hip"),
            Target(MODULE, "MHCFusedPostPreOp.forward_hip"),
            Target(MODULE, "_has_tilelang_mhc"),
            Target("vllm.model_executor.kernels.mhc.torch", "mhc_pre_torch"),
        ),
        rows=("F04", "F66", "F80"),
    ),
    Patch(
        id="mhc-kernels",
        title="mHC without AITER in one or two launches instead of 148",
        symptom="decode is bound by launches where AITER's mHC is absent or fails: 148 of them a seam, two seams a "
        "layer; the head takes nine, with AITER as well",
        cause="the only fallback is torch, with Sinkhorn as a Python loop; and without AITER the decoder layer never "
        "takes its path with post, pre and RMSNorm in one operator",
        remedy="this bundle's kernels, tried against torch once per process, where AITER's are not used; the layer "
        f"takes the path with one operator. {SWITCH}=torch or {switch.SWITCH} without `mhc` switches them off",
        upstream="https://github.com/ryanzhou/deepseek-v4-flash-mi300x",
        upstream_state="profiles of MI300X that show decode bound by launches",
        drop_when="vLLM has kernels for gfx942 that do not need AITER",
        platforms=("gfx942",),
        after=("mhc-backend",),
        targets=(
            Target(MODULE, "MHCPreOp.forward_hip", _pre_op),
            Target(MODULE, "MHCFusedPostPreOp.forward_hip", _fused_op),
            Target(MODULE, "MHCPostOp.forward_hip", _post_op),
            Target(MODULE, "HCHeadOp.forward_hip", _head_op),
            Target(MODEL, "DeepseekV4DecoderLayer.__init__", _fusing_layer),
            Target(MODEL, "DeepseekV4ForCausalLM.process_weights_after_loading", _fresh_weights),
            Target(MODEL, "DeepseekV4DecoderLayer.forward"),
            Target(MODEL, "DeepseekV4DecoderLayer._forward_fused_post_pre"),
            Target(MODEL, "DeepseekV4DecoderLayer.hc_post"),
            Target(MODEL, "DeepseekV4Model.forward"),
            Target("vllm.model_executor.kernels.mhc.torch", "mhc_pre_torch"),
            Target("vllm.model_executor.kernels.mhc.torch", "mhc_post_torch"),
        ),
    ),
)
