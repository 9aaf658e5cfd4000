"""How GGUF files of Qwen3.5 are read: value heads in another order, norms with 1 added, decays as they are used."""

import numpy as np

from openinfer.recipes.engine import gguf
from openinfer.tensor import GgufEntry, GgufFile

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"

NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def _config(meta: gguf.GgufMetadata, file: GgufFile) -> gguf.Json:
    found = gguf.common(meta, file)
    names = ("state_size", "time_step_rank", "group_count")
    key, rank, groups = (meta.of(f"ssm.{name}", int) for name in names)
    inner = meta.of("ssm.inner_size", int)
    if rank < 1 or groups < 1 or inner % rank or rank % groups:
        raise meta.wrong(
            "qwen35.ssm", f"has {rank} value heads, {groups} key heads and {inner} values, which do not fit"
        )
    dim, sections = meta.of("attention.key_length", int), meta.of("rope.dimension_sections", list, [])
    turned = meta.of("rope.dimension_count", int, dim // 4)
    rope: gguf.Json = {
        "rope_type": "default",
        "rope_theta": found.pop("rope_theta"),
        "partial_rotary_factor": turned / dim,
    }
    if scaling := found.pop("rope_scaling", None):
        rope |= scaling
    if sections:
        rope |= {"mrope_interleaved": True, "mrope_section": [one for one in sections if one]}
    every = meta.of("full_attention_interval", int, 4)
    text = found | {
        "model_type": "qwen3_5_text",
        "intermediate_size": meta.of("feed_forward_length", int),
        "head_dim": dim,
        "linear_key_head_dim": key,
        "linear_value_head_dim": inner // rank,
        "linear_num_key_heads": groups,
        "linear_num_value_heads": rank,
        "linear_conv_kernel_dim": meta.of("ssm.conv_kernel", int),
        "full_attention_interval": every,
        "layer_types": [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(found["num_hidden_layers"])
        ],
        "attn_output_gate": True,
        "rope_parameters": rope,
        "mtp_num_hidden_layers": 0,
    }
    return {"model_type": "qwen3_5", "tie_word_embeddings": found["tie_word_embeddings"], "text_config": text}


def _less_one(weight: gguf.Array) -> gguf.Array:
    return np.asarray(weight - 1, np.float32)


def _entries(meta: gguf.GgufMetadata, config: gguf.Json) -> gguf.Entries:
    text, prefix = config["text_config"], "model.language_model."
    yield from gguf.outer(prefix, config["tie_word_embeddings"], _less_one)
    key_heads, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    # Published head k * (heads / key_heads) + r is the file's head r * key_heads + k.
    order = np.arange(heads).reshape(heads // key_heads, key_heads).T.reshape(-1)
    width = text["linear_value_head_dim"]
    values = (order[:, None] * width + np.arange(width)).reshape(-1)
    keys = 2 * key_heads * text["linear_key_head_dim"]
    conv = np.concatenate([np.arange(keys), keys + values])
    for layer, kind in enumerate(text["layer_types"]):
        stored, name = f"blk.{layer}.", f"{prefix}layers.{layer}."
        for norm, published in NORMS.items():
            yield f"{name}{published}.weight", GgufEntry(f"{stored}{norm}.weight", change=_less_one)
        for one, published in gguf.MLP.items():
            yield f"{name}mlp.{published}.weight", GgufEntry(f"{stored}{one}.weight")
        if kind == "full_attention":
            for one, published in gguf.ATTENTION.items():
                yield f"{name}self_attn.{published}.weight", GgufEntry(f"{stored}{one}.weight")
            for one in "qk":
                entry = GgufEntry(f"{stored}attn_{one}_norm.weight", change=_less_one)
                yield f"{name}self_attn.{one}_norm.weight", entry
            continue
        mixer, taps = f"{name}linear_attn.", text["linear_conv_kernel_dim"]
        yield f"{mixer}in_proj_qkv.weight", GgufEntry(f"{stored}attn_qkv.weight", conv)
        yield f"{mixer}in_proj_z.weight", GgufEntry(f"{stored}attn_gate.weight", values)
        yield f"{mixer}in_proj_a.weight", GgufEntry(f"{stored}ssm_alpha.weight", order)
        yield f"{mixer}in_proj_b.weight", GgufEntry(f"{stored}ssm_beta.weight", order)
        conv1d = GgufEntry(f"{stored}ssm_conv1d.weight", conv, shape=(len(conv), 1, taps))
        yield f"{mixer}conv1d.weight", conv1d
        yield f"{mixer}dt_bias", GgufEntry(f"{stored}ssm_dt.bias", columns=order)
        a_log = GgufEntry(
            f"{stored}ssm_a", columns=order, change=lambda a: np.asarray(np.log(-a), np.float32)
        )
        yield f"{mixer}A_log", a_log
        yield f"{mixer}norm.weight", GgufEntry(f"{stored}ssm_norm.weight")
        yield f"{mixer}out_proj.weight", GgufEntry(f"{stored}ssm_out.weight", columns=values)


FORMAT = gguf.GgufFormat(_config, _entries, {"qwen35": _WORDS + r"|\s*[\r\n]+|\s+(?!\S)|\s+"})
