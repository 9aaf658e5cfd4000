"""The golden DeepSeek-V4 with a DSpark drafter in place of its MTP layer, and that drafter written out in numpy from
its published description, for one row.

A random drafter is never right, so the Markov head knows most tokens that follow each other in the golden texts.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from openinfer.recipes.engine.testing.checkpoint import write_tensors
from openinfer.tensor import Checkpoint, bfloat16, float8_e4m3fn, float8_e8m0fnu

Array = np.ndarray[Any, Any]
SOURCE = Path(__file__).parent / "goldens" / "deepseek_v4-tiny"
STAGES, BLOCK, RANK, TARGETS, NOISE = 3, 5, 32, (0, 2), 500
CONFIG = {
    "num_nextn_predict_layers": 1, "dspark_block_size": BLOCK, "dspark_noise_token_id": NOISE,
    "dspark_target_layer_ids": list(TARGETS), "dspark_markov_rank": RANK, "compress_ratios": [0, 4, 128, 0, 0, 0],
}  # fmt: skip
OF_MTP = ("e_proj", "h_proj", "enorm", "hnorm", "hc_head", ".norm.")


def read(path: Path) -> dict[str, Array]:
    with Checkpoint(path) as checkpoint:
        return {name: np.array(checkpoint.array(name)) for name in checkpoint.names}


def drafter_tensors(seed: int = 0) -> dict[str, Array]:
    """mtp.*: layers made of the golden's MTP layer, with their rows in another order each."""
    rng, golden = np.random.default_rng(seed), read(SOURCE)
    config = json.loads((SOURCE / "config.json").read_text())
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layer = {n: x for n, x in golden.items() if n.startswith("mtp.") and not any(p in n for p in OF_MTP)}
    made = {
        n.replace("mtp.0", f"mtp.{s}"): x if n.endswith((".scale", ".bias")) else np.roll(x, 5 * s, 0)
        for s in range(STAGES)
        for n, x in layer.items()
    }
    last = f"mtp.{STAGES - 1}."
    made |= {n.replace("mtp.0.", last): x for n, x in golden.items() if "mtp.0.hc_head" in n}
    made[last + "norm.weight"] = golden["mtp.0.norm.weight"]
    made["mtp.0.main_norm.weight"] = (1 + 0.1 * rng.standard_normal(hidden)).astype(bfloat16)
    proj = rng.standard_normal((hidden, len(TARGETS) * hidden)) * 16
    made["mtp.0.main_proj.weight"] = proj.astype(float8_e4m3fn)
    made["mtp.0.main_proj.scale"] = np.full((1, len(TARGETS)), 2.0**-8, np.float32).astype(float8_e8m0fnu)
    before = rng.standard_normal((vocab, RANK))
    after = rng.standard_normal((vocab, RANK)) / RANK**0.5
    counts = Counter(pair for text in golden_texts() for pair in pairwise(text.tolist()))
    known = {a: b for (a, b), _ in reversed(counts.most_common())}
    for a, b in list(known.items())[: 9 * len(known) // 10]:
        after[b] += 4 * before[a] / np.linalg.norm(before[a])
    made[last + "markov_head.markov_w1.weight"] = before.astype(bfloat16)
    made[last + "markov_head.markov_w2.weight"] = after.astype(bfloat16)
    sure = rng.standard_normal((1, hidden + RANK)) / (hidden + RANK) ** 0.5
    made[last + "confidence_head.proj.weight"] = sure.astype(bfloat16)
    return made


def golden_texts() -> list[Array]:
    """The golden prompts' last tokens with the greedy tokens that follow."""
    numbers = load_file(SOURCE / "golden.safetensors")
    return [np.concatenate([numbers[f"p{i}.ids"][-1:], numbers[f"p{i}.greedy_ids"]]) for i in range(5)]


def write_dspark(folder: Path, lost: str = "no tensor", **changes: Any) -> Path:
    """The checkpoint. changes: of config.json. lost: the beginning of names that are left out."""
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((SOURCE / "config.json").read_text()) | CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    main = {name: array for name, array in read(SOURCE).items() if not name.startswith("mtp.")}
    drafter = {name: array for name, array in drafter_tensors().items() if not name.startswith(lost)}
    write_tensors(folder / "model.safetensors", main | drafter)
    return folder


class Reference:
    """The drafter in float32, of a checkpoint that `write_dspark` wrote."""

    def __init__(self, folder: Path) -> None:
        self.w, self.c = dequantised(read(folder)), json.loads((folder / "config.json").read_text())

    def rms(self, x: Array, name: str = "") -> Array:
        y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.c["rms_norm_eps"])
        return y * self.w[name] if name else y

    def turn(self, x: Array, positions: Any, sign: int = 1) -> Array:
        """x [T, ..., d] with its last channels rotated in pairs of neighbours."""
        r = self.c["qk_rope_head_dim"]
        angle = np.asarray(positions)[:, None] * self.c["rope_theta"] ** (-np.arange(0, r, 2) / r)
        angle = angle.reshape(len(x), *[1] * (x.ndim - 2), r // 2)
        z = (x[..., -r::2] + 1j * x[..., 1 - r :: 2]) * np.exp(1j * sign * angle)
        out = x.copy()
        out[..., -r::2], out[..., 1 - r :: 2] = z.real, z.imag
        return out

    def mixing(self, streams: Array, at: str) -> Array:
        flat = streams.reshape(len(streams), -1)
        return self.rms(flat) @ self.w[at + "_fn"].T

    def pre(self, streams: Array, at: str) -> tuple[Array, Array, Array]:
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        m, scale, base = self.mixing(streams, at), self.w[at + "_scale"], self.w[at + "_base"]
        read = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        mix = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        mix = np.exp(mix - mix.max(2, keepdims=True))
        mix = mix / mix.sum(2, keepdims=True) + eps
        mix = mix / (mix.sum(1, keepdims=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(2, keepdims=True) + eps)
            mix = mix / (mix.sum(1, keepdims=True) + eps)
        return np.einsum("ts,tsd->td", read, streams), post, mix

    def experts(self, x: Array, at: str) -> Array:
        c, w, most = self.c, self.w, self.c["swiglu_limit"]
        scores = np.sqrt(np.log1p(np.exp(x @ w[at + "gate.weight"].T)))
        chosen = np.argsort(-(scores + w[at + "gate.bias"]), axis=1)[:, : c["num_experts_per_tok"]]
        share = np.take_along_axis(scores, chosen, 1)
        share = share / share.sum(1, keepdims=True) * c["routed_scaling_factor"]

        def mlp(name: str, y: Array) -> Array:
            gate = np.minimum(y @ w[name + "w1.weight"].T, most)
            up = np.clip(y @ w[name + "w3.weight"].T, -most, most)
            return np.asarray((gate * sigmoid(gate) * up) @ w[name + "w2.weight"].T)

        out = mlp(at + "shared_experts.", x)
        for t, k in np.ndindex(chosen.shape):
            out[t] += share[t, k] * mlp(f"{at}experts.{chosen[t, k]}.", x[t])
        return out

    def main_x(self, read: Array) -> Array:
        """read [T, k D]: means of the streams after the target layers."""
        return self.rms(read @ self.w["mtp.0.main_proj.weight"].T, "mtp.0.main_norm.weight")

    def block(self, read: Array, anchor: int) -> Array:
        """[B, D]: what the heads read, for a sequence of len(read) tokens."""
        c, w, count = self.c, self.w, len(read)
        heads, dim, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
        positions, main = np.arange(count, count + BLOCK), self.main_x(read)
        streams = np.repeat(w["embed.weight"][[anchor, *[NOISE] * (BLOCK - 1)]][:, None], c["hc_mult"], 1)
        for s in range(STAGES):
            at, a = f"mtp.{s}.", f"mtp.{s}.attn."

            def vectors(x: Array, places: Array, a: str = a) -> Array:
                return self.turn(self.rms(x @ w[a + "wkv.weight"].T, a + "kv_norm.weight"), places)

            x, post, mix = self.pre(streams, at + "hc_attn")
            x = self.rms(x, at + "attn_norm.weight")
            q = self.rms(x @ w[a + "wq_a.weight"].T, a + "q_norm.weight") @ w[a + "wq_b.weight"].T
            q = self.turn(self.rms(q.reshape(BLOCK, heads, dim)), positions)
            context = vectors(main, np.arange(count))[-c["sliding_window"] :]
            keys = np.concatenate([context, vectors(x, positions)])
            e = np.exp(np.einsum("bad,kd->bak", q, keys) * dim**-0.5)
            e = e / (e.sum(2, keepdims=True) + np.exp(w[a + "attn_sink"])[:, None])
            o = self.turn(np.einsum("bak,kd->bad", e, keys), positions, -1).reshape(BLOCK, groups, -1)
            o = np.einsum("bgi,gri->bgr", o, w[a + "wo_a.weight"].reshape(groups, c["o_lora_rank"], -1))
            y = o.reshape(BLOCK, -1) @ w[a + "wo_b.weight"].T
            streams = post[:, :, None] * y[:, None] + np.einsum("bjk,bjd->bkd", mix, streams)
            x, post, mix = self.pre(streams, at + "hc_ffn")
            y = self.experts(self.rms(x, at + "ffn_norm.weight"), at + "ffn.")
            streams = post[:, :, None] * y[:, None] + np.einsum("bjk,bjd->bkd", mix, streams)
        at = f"mtp.{STAGES - 1}.hc_head"
        share = sigmoid(self.mixing(streams, at) * w[at + "_scale"] + w[at + "_base"]) + c["hc_eps"]
        return np.einsum("ts,tsd->td", share, streams)

    def propose(self, read: Array, anchor: int) -> tuple[list[int], Array, Array]:
        """The drafts, the logits [B, V] and the confidence [B] of each."""
        at, w, hidden = f"mtp.{STAGES - 1}.", self.w, self.block(read, anchor)
        base = self.rms(hidden, at + "norm.weight") @ w["head.weight"].T
        drafts, logits, sure = [anchor], [], []
        for i in range(BLOCK):
            e = w[at + "markov_head.markov_w1.weight"][drafts[-1]]
            logits.append(base[i] + w[at + "markov_head.markov_w2.weight"] @ e)
            sure.append(sigmoid(np.concatenate([hidden[i], e]) @ w[at + "confidence_head.proj.weight"][0]))
            drafts.append(int(logits[-1].argmax()))
        return drafts[1:], np.stack(logits), np.array(sure)


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def dequantised(tensors: dict[str, Array]) -> dict[str, Array]:
    """float32 values: FP8 in blocks of 128 x 128, FP4 in rows of 32 (low nibbles first), E8M0 scales."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values, found = np.concatenate([values, -values]), {}
    for name, x in tensors.items():
        scale = tensors.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        if scale is None:
            found[name] = x.astype(np.float32)
        elif x.dtype == np.int8:
            codes = np.stack([x.view(np.uint8) & 15, x.view(np.uint8) >> 4], -1).reshape(len(x), -1)
            found[name] = values[codes] * np.repeat(scale.astype(np.float32), 32, 1)
        else:
            wide = np.repeat(np.repeat(scale.astype(np.float32), 128, 0), 128, 1)
            found[name] = x.astype(np.float32) * wide[: x.shape[0], : x.shape[1]]
    return found
