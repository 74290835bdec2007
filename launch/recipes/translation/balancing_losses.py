"""Translate load-balancing losses of mixtures of experts to policy.moe_aux_loss_coeff, the loss of each sequence and layer."""

from __future__ import annotations

from launch.recipes.model_files import described
from launch.recipes.translation.translator import Translator
from pipeline.models.backend_support import expert_count

OURS, MODEL = "policy.moe_aux_loss_coeff", "policy.model_name"
NONE = "no load-balancing loss is added, since"
ADAPTED = "adapters leave routers frozen"
KINDS = {
    "aux_loss": "not of each microbatch",
    "seq_aux_loss": "also in packed microbatches, which Megatron-Core counts as one sequence",
    "global_aux_loss": "not of all microbatches so far",
}
"""Values of Megatron-Core's moe_router_load_balancing_type -> how the loss of each sequence differs."""


def from_megatron(t: Translator, kind_key: str, coefficient_key: str, frozen: str = "") -> None:
    """Translate Megatron-Core's loss. frozen: why routers do not train; empty if they do.

    Without a coefficient, it is that of the model's config.json, as Megatron-Bridge reads it.
    """
    kind, given = t.consume(kind_key), t.consume(coefficient_key)
    config = described(t.get_layer(MODEL))
    if kind in (None, "none") or (config is not None and not expert_count(config)):
        return
    if not isinstance(kind, str) or kind not in KINDS:  # several losses are a list
        t.lacks(kind_key, kind, "this balancing of experts", "seq_aux_loss")
        return
    of_model = [(config or {}).get(name) for name in ("router_aux_loss_coef", "aux_loss_alpha")]
    coefficient = next((value for value in (given, *of_model) if value is not None), None)
    theirs = f"{kind_key}={kind}"
    if frozen:
        t.change(theirs, f"{NONE} {frozen}")
    elif coefficient is None:
        t.change(theirs, f"{NONE} the model's coefficient is unknown; {OURS} sets one")
    elif coefficient:
        t.put(OURS, coefficient, kind_key if given is None else coefficient_key)
        t.change(theirs, f"the loss with {OURS}={coefficient} is of each sequence, {KINDS[kind]}")


def from_transformers(t: Translator, key: str, frozen: str = "") -> None:
    """Translate the coefficient of transformers' loss, by default that of the model's config.json. frozen: see `from_megatron`.

    transformers' load_balancing_loss_func is E sum_i f_i P_i. f_i and P_i are means over the tokens of a microbatch, in all L
    layers together, and the f_i add up to k. Where layers and sequences are alike, its gradient is that of ours times k / L.
    """
    given, config = t.consume(key), described(t.get_layer(MODEL))
    coefficient = (config or {}).get("router_aux_loss_coef") if given is None else given
    if not coefficient:
        return
    theirs = f"{key}={coefficient}" if given is not None else f"router_aux_loss_coef={coefficient} of the model"
    if config is not None and not expert_count(config):
        if given is not None:
            t.ignore(theirs, "has no effect, since the model has no experts")
        return
    if frozen:
        t.change(theirs, f"{NONE} {frozen}")
        return
    chosen = (config or {}).get("num_experts_per_tok")
    if config is None or chosen is None:
        t.change(theirs, f"{NONE} the model is unknown here; try {OURS}={coefficient} x experts of a token / layers")
        return
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = sum(i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"]))
    ours = float(f"{coefficient * chosen / layers:.6g}")
    t.put(OURS, ours, key)
    why = "the loss is of each sequence and layer, and divided by the experts of a token"
    t.change(theirs, f"{why}, so {OURS}={ours:g}, which is {coefficient} x {chosen} experts / {layers} layers")
