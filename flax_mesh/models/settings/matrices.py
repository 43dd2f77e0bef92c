"""The text of `optimizer.matrices` of a decoder: the matrices that Muon updates."""


def matrices_of(*, experts: bool, shared: bool, dense: bool, latents: bool, gate: bool, delta: bool) -> str:
    """Every projection except the embedding, the head and the router, for decoders that have these parts."""
    mlp = "moe/(gate|up|down)/kernel 1>2" if experts else "mlp/.*/kernel"
    mlp += "; shared_mlp/.*/kernel" if experts and shared else ""
    mlp += "; dense_layers/.*mlp/.*/kernel" if dense else ""
    qkv = "attention/[qkv]/kernel 0>1,2"
    if latents:
        qkv = "attention/(q|kv)_down/kernel; attention/(q|q_up|kv_up)/kernel 0>1,2"
    qkv += "; attention/gate/kernel 0>1,2" if gate else ""
    qkv += "; delta/(q|k|v|gate)/kernel 0>1,2; delta/o/kernel 0,1>2" if delta else ""
    return f"{qkv}; attention/o/kernel 0,1>2; {mlp}"
