"""Layers that see a window only, as config.json says it, against what GGUF can say of an architecture."""

from __future__ import annotations

from edgeinfer.exporters.conversion.model import Model

_WINDOW = "sliding_attention"


def refuse_windows(model: Model) -> None:
    """Raises UnsupportedModel where a window cuts something off within the context of the model.

    For architectures whose GGUF files cannot say it.
    """
    types = model.layer_types()
    has_window = model.config.flag("use_sliding_window", False) if types is None else _WINDOW in types
    if types is None and model.config.integer("max_window_layers", 0, least=0) >= model.n_layers:
        has_window = False
    window = model.config.integer("sliding_window", 0, least=0)
    if has_window and 0 < window < model.n_ctx:
        model.refuse("sliding_window", f"must be off, {model.recipe.name} files have none in GGUF: found {window}")


def context_within_window(model: Model) -> int:
    """The context up to which a window that every layer has cuts nothing off; GGUF has none for this architecture."""
    window = model.config.integer("sliding_window", 0, least=0)
    if not 0 < window < model.n_ctx:
        return model.n_ctx
    model.note(
        f"sliding_window {window}: GGUF has no windows for {model.recipe.name}, so the file says that its context is "
        f"{window} tokens, not {model.n_ctx}; up to there they change nothing"
    )
    return window


def check_period(model: Model, period: int) -> None:
    """Raises UnsupportedModel unless the last layer of each period sees everything, and no other.

    config.json says it with a list or a number; where it says nothing, transformers takes this period too.
    """
    types, name = model.layer_types(), model.recipe.name
    if types is None:
        found = model.config.get("sliding_window_pattern") or model.config.get("_sliding_window_pattern") or period
        if found != period:
            model.refuse("sliding_window_pattern", f"must be {period} for {name} in GGUF: found {found!r:.80}")
        return
    expected = ["full_attention" if layer % period == period - 1 else _WINDOW for layer in range(model.n_layers)]
    for layer, (kind, usual) in enumerate(zip(types, expected, strict=True)):
        if kind != usual:
            model.refuse("layer_types", f"must be {usual} in layer {layer} for {name} in GGUF: found {kind:.80}")


def has_window(model: Model) -> list[bool] | None:
    """Whether each layer has a window, None where config.json does not say it."""
    types = model.layer_types()
    if types is None:
        return None
    for layer, kind in enumerate(types):
        if kind not in (_WINDOW, "full_attention"):
            model.refuse("layer_types", f"must be {_WINDOW} or full_attention: found {kind!r:.80} in layer {layer}")
    return [kind == _WINDOW for kind in types]
