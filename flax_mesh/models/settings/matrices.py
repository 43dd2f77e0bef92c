"""The text of `optimizer.matrices` of a decoder: the matrices that Muon updates."""

from types import SimpleNamespace


def matrices_of(config: SimpleNamespace, *, delta: bool) -> str:
    """Every projection except the embedding, the head and the router; `delta`: whether some layers are delta nets."""
    mlp = "moe/(gate|up|down)/kernel 1>2" if config.num_experts else "mlp/.*/kernel"
    mlp += "; shared_mlp/.*/kernel" if config.num_experts and config.shared_expert_size else ""
    mlp += "; dense_layers/.*mlp/.*/kernel" if config.dense_layers else ""
    mlp += "; predictions/.*/projection/kernel" if config.prediction_layers else ""
    qkv = "attention/[qkv]/kernel 0>1,2"
    if config.latent_size:
        qkv = "attention/(q|kv)_down/kernel; attention/(q|q_up|kv_up)/kernel 0>1,2"
    qkv += "; attention/gate/kernel 0>1,2" if config.attention_gate else ""
    qkv += "; delta/(q|k|v|gate)/kernel 0>1,2; delta/o/kernel 0,1>2" if delta else ""
    return f"{qkv}; attention/o/kernel 0,1>2; {mlp}"
