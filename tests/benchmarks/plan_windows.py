"""KV caches that the native engine plans for models with windows, beside those without; nothing is loaded.

    python tests/benchmarks/plan_windows.py

Layers, KV heads, head sizes and windows are those of the models' configurations. One JSON line on stdout, in MiB.
"""

import argparse
import json

from edgeinfer.backends.native import _core

N_BATCH = 512
# n_layers, n_kv_heads, head_dim, window, period: of each period the last layer sees everything.
SIZES = {
    "gemma-3-1b": (26, 1, 256, 512, 6),
    "gemma-3-4b": (34, 4, 256, 1024, 6),
    "gemma-2-2b": (26, 4, 256, 4096, 2),
}
CONTEXTS = {"gemma-3-1b": (4096, 32768), "gemma-3-4b": (4096, 32768), "gemma-2-2b": (8192,)}


def planned_mib(model: str, n_ctx: int, cache_type: str, has_windows: bool) -> float:
    """MiB of the KV cache of one text of n_ctx positions."""
    n_layers, n_kv_heads, head_dim, window, period = SIZES[model]
    n_embd = n_kv_heads * head_dim  # not looked at
    config = _core.DecoderConfig(n_vocab=1, n_logits=1, n_embd=n_embd, n_ctx=n_ctx, n_batch=N_BATCH, norm_epsilon=1e-6)
    for layer in range(n_layers):
        attention = _core.AttentionConfig(
            n_in=n_embd,
            n_heads=n_kv_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            rope=-1,
            query_scales=0,
            window=window if has_windows and layer % period < period - 1 else 0,
            soft_cap=0.0,
            qk_norm=_core.QKNorm.none,
            key_bias=False,
        )
        config.add_layer(attention, _core.DenseConfig(n_ff=1, activation=_core.Activation.silu))
    return round(config.kv_bytes(_core.KvType[cache_type], n_ctx) / 2**20, 1)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    plans = [
        {"model": model, "n_ctx": n_ctx}
        | {
            name: {kind: planned_mib(model, n_ctx, kind, has_windows) for kind in ("f16", "q8_0")}
            for name, has_windows in (("full_caches", False), ("windows", True))
        }
        for model, contexts in CONTEXTS.items()
        for n_ctx in contexts
    ]
    print(json.dumps({"benchmark": "plan_windows", "n_batch": N_BATCH, "plans": plans}))


if __name__ == "__main__":
    main()
