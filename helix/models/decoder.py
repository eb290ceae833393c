"""Decoder-only transformer over a Helix layout; model families differ only in their `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comm import turns
from comm.base import Communicator
from comm.hopb import Pipeline
from comm.pending import PendingSum
from comm.solo import SoloCommunicator
from helix.attention.base import AttentionPolicy
from helix.layers.attention import Attention
from helix.layers.embedding import Embedding, Head
from helix.layers.gated_delta import GatedDeltaNet
from helix.layers.linear import RowParallel
from helix.layers.mixer import LayerPlace, Mixer
from helix.layers.mla import MLA, deals_rows
from helix.layers.mlp import GatedMLP
from helix.layers.moe import MoE
from helix.layers.norm import AllReduceNorm, JoinNorm
from helix.layers.rotary import Angles, Rotary
from helix.layers.rows import over_all_ranks
from helix.layers.specs import AttentionSpec, Formats, GatedDeltaSpec, MLASpec, MLPSpec, MoESpec, unpacked
from helix.layers.weights import Weights
from helix.layout import HelixLayout
from helix.models.spec import DecoderSpec, NextTokenNames
from helix.worker.dealt import all_rows, dealt
from helix.worker.kv_cache import KVCache
from helix.worker.step import Step

# What computes a mixer of each spec, on a rank: made of weights, communicator, layout, spec and place.
MIXERS: dict[type[Any], Callable[..., Mixer]] = {
    AttentionSpec: Attention,
    MLASpec: MLA,
    GatedDeltaSpec: GatedDeltaNet,
}


def make_ffn(
    spec: MLPSpec | MoESpec, weights: Weights, comm: Communicator, layout: HelixLayout, hidden: int, layer: str
) -> GatedMLP | MoE:
    """Builds this rank's part of an FFN; `layer` is the name of its layer in the checkpoint."""
    if isinstance(spec, MoESpec):
        return MoE(weights, comm, layout, hidden, spec, f"{layer}.{spec.block}")
    return GatedMLP(weights, comm, layout, hidden, spec, f"{layer}.mlp")


class DecoderLayer:
    """Residual block: attention over KVP x TPA, then the FFN over the same ranks, with norms around both.

    Each sum over ranks is done by the norm that follows it, which reads the whole residual stream anyway. In mode dp
    attention and norms have this rank's sequences alone, and the FFN gathers rows and scatters sums.

    Args:
        comm: the communicator of all ranks.
        own: that of the ranks which attend the same sequences.
        name: prefix of its tensors, if it is not one of the model's own layers.
    """

    def __init__(
        self,
        weights: Weights,
        comm: Communicator,
        own: Communicator,
        layout: HelixLayout,
        spec: DecoderSpec,
        index: int,
        pipeline: Pipeline,
        before: AllReduceNorm | None,
        name: str = "",
    ) -> None:
        self.index = index
        self.comm, self._scattered = comm, own is not comm
        name, layer = name or f"model.layers.{index}", spec.stack[index]

        def norm(part: str) -> AllReduceNorm:
            return AllReduceNorm(weights, own, f"{name}.{part}_layernorm", spec.hidden, spec.norm_eps)

        first = None if spec.norms == "after" else norm("input")
        self.input_norm = JoinNorm(own, before, first)
        self.mixer = MIXERS[type(layer.mixer)](weights, own, layout, layer.mixer, LayerPlace(name, index, pipeline))
        middle = norm("post_attention")
        if spec.norms == "before":
            self.ffn_norm = JoinNorm(own, None, middle)
        else:
            self.ffn_norm = JoinNorm(own, middle, norm("pre_feedforward") if spec.norms == "around" else None)
        self.ffn = make_ffn(layer.ffn, weights, comm, layout, spec.hidden, name)
        self.added = None if spec.norms == "before" else norm("post_feedforward")
        self.rope = 0 if layer.rope is None else spec.ropes.index(layer.rope)

    def queries(self, x: Tensor, angles: Angles, cache: KVCache, step: Step) -> Tensor:
        """Computes queries [N, Hq, D] of this TPA slice for a guessed input x [N, H]; appends no keys."""
        assert isinstance(self.mixer, Attention), "latents have no block selection"
        return self.mixer.queries(self.input_norm.of(x), angles, cache, step)

    def feed(self, x: Tensor, step: Step) -> Tensor | PendingSum:
        """Computes the FFN of x [N, H]: a part of a sum over ranks, or in mode dp the whole sum."""
        return over_all_ranks(self.ffn, x, step.counts, self.comm) if self._scattered else self.ffn(x)


class NextTokenLayer:
    """Layer for multi-token prediction (MTP), a `DraftLayer`; its states are normalised hidden states like the model's.

    Source:
        DeepSeek-V3, section 2.2 (https://arxiv.org/abs/2412.19437).
    """

    window: int | None = None

    def __init__(
        self, weights: Weights, comm: Communicator, layout: HelixLayout, spec: DecoderSpec, model: Decoder
    ) -> None:
        index, hidden = len(spec.layers), spec.hidden
        self.read = self.width = hidden
        self.choice = spec.brought_choice
        self.vocab_rows, self.logits = model.embedding.rows, model.head
        self._embedding = model.embedding
        names = NextTokenNames(*(name.format(index) for name in spec.brought_names))
        self.token_norm = AllReduceNorm(weights, comm, names.token_norm, hidden, spec.norm_eps)
        self.state_norm = AllReduceNorm(weights, comm, names.state_norm, hidden, spec.norm_eps)
        self.columns = layout.ffn_columns(comm.rank, 2 * hidden)
        self.join = RowParallel(weights, comm, names.join, self.columns, 2 * hidden, hidden, False)
        self.layer = DecoderLayer(weights, comm, comm, layout, spec, index, model.pipeline, None, names.layer)
        self._rotary = model.rotary[self.layer.rope]
        self.norm = AllReduceNorm(weights, comm, names.norm, hidden, spec.norm_eps)

    def append(self, cache: KVCache, step: Step, states: Tensor, *, own: bool) -> tuple[Any, Tensor]:
        both = torch.cat((self.token_norm(self._embedding(step.tokens), None)[0], self.state_norm.of(states)), 1)
        parts = self.join(both[:, self.columns.start : self.columns.stop].contiguous())
        normed, x = self.layer.input_norm(parts, None)
        return self.layer.mixer.project(normed, self._rotary.angles(step.positions), cache, step), x

    def attend(self, queries: Any, x: Tensor, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        normed, x = self.layer.ffn_norm(self.layer.mixer.finish(queries, cache, step, policy), x)
        return self.norm(self.layer.feed(normed, step), x)[0]


class Decoder:
    """Part of the model on this rank.

    Args:
        comm: the communicator of all ranks.
        dtype: dtype of activations, the KV cache, and weights that are not kept in few bits.
        formats: storage of the weights.

    Attributes:
        own: the communicator of the ranks with this rank's sequences: of all ranks, or in mode dp of itself alone.
        pipeline: runs the HOP-B chunks of all layers' attention.
        turns: runs the two halves of long prefill steps.
        layers_run: layers computed, or launched, since the start: a long step on a CPU shows its progress here.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layout: HelixLayout,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        formats: Formats = unpacked,
    ) -> None:
        self.spec, self.comm = spec, comm
        self.full = {*spec.full}
        self.layers_run = 0
        self.own = SoloCommunicator(comm.device) if layout.dp > 1 else comm
        self.weights = weights = Weights(dtype, device, formats, spec.gain_offset)
        rows = layout.vocab_rows(comm.rank, spec.vocab)
        self.embedding = Embedding(weights, "model.embed_tokens", rows, spec.vocab, spec.hidden)
        scale = spec.embedding_scale
        self._embedding_scale = torch.tensor(scale, dtype=dtype).item() if spec.rounds_scale else scale
        self.pipeline = Pipeline(device if comm.capturable else None)
        self.turns = turns.Turns(self.own)
        parts = weights, comm, self.own, layout, spec
        self.layers: list[DecoderLayer] = []
        added = None  # the norm of what the layer before adds
        for index in range(len(spec.layers)):
            self.layers.append(DecoderLayer(*parts, index, self.pipeline, added))
            added = self.layers[-1].added
        norm = AllReduceNorm(weights, self.own, "model.norm", spec.hidden, spec.norm_eps)
        self.norm = JoinNorm(self.own, added, norm)
        self.head = Head(weights, None if spec.tied else "lm_head", self.embedding, spec.vocab, spec.hidden)
        self.rotary = [Rotary(rope, dtype, device) for rope in spec.ropes]
        self._adds_squares = any(
            isinstance(layer.mixer, Attention) and layer.mixer.adds_squares for layer in self.layers
        )
        self.next_token: NextTokenLayer | None = None
        if spec.draft is not None and spec.draft is spec.brought:
            self.next_token = NextTokenLayer(weights, comm, layout, spec, self)

    def hidden(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Runs a step as `states` does; returns the normalised hidden states [N, H]."""
        return self.states(cache, step, policy)[0]

    def states(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> tuple[Tensor, Tensor]:
        """Runs a step through all layers and appends its KV.

        Args:
            policy: chooses the keys that a query reads in this step; steps of different policies may share a cache.

        Returns:
            Normalised hidden states [N, H], and the states that a draft layer reads: the same, or those of
            `DecoderSpec.taps` side by side. All are the same on all ranks of `own`.
        """
        mixer = self.spec.attention
        if isinstance(mixer, MLASpec) and deals_rows(mixer, step):
            step = dealt(step)
        found = [found for (found,) in self._run(cache, step, policy)]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        if not self.spec.taps:
            return whole, whole
        return whole[:, : self.spec.hidden].contiguous(), whole[:, self.spec.hidden :].contiguous()

    def last_states(self, cache: KVCache, step: Step, policy: AttentionPolicy) -> Tensor:
        """Runs a prefill step as `states` does; returns the normalised hidden states [n, H] of each last token alone.

        The last layer appends what it keeps of all tokens, and does what follows for the last ones.
        """
        assert step.cu_q is not None
        layer, mixer = self.layers[-1], self.spec.layers[-1].mixer
        chooses = isinstance(mixer, MLASpec) and mixer.topk is not None
        # In mode dp FFNs gather rows of all ranks, and in host memory keys are read by the parts of a chunk.
        if self.own is not layer.comm or step.staged is not None or not mixer.attends or chooses:
            return self.hidden(cache, step, policy)[step.cu_q[1:] - 1]
        rows, lasts = step.lasts()
        q, x = _selected(self._run(cache, step, policy, until_attention=True), rows)
        policy.prepare(lasts, {mixer.window})
        normed, x = layer.ffn_norm(layer.mixer.finish(q, cache, lasts, policy), x)
        return self.norm(layer.feed(normed, lasts), x)[0][: len(step.slots)]

    def _run(
        self, cache: KVCache, step: Step, policy: AttentionPolicy, until_attention: bool = False
    ) -> list[tuple[Any, ...]]:
        """Runs a step, or halves of a long prefill step side by side; returns what `_through` yields last of each."""
        # Halves cannot overlap if all layers share the GPU pages of a chunk (cache in host memory), nor with states,
        # which depend on all earlier tokens, nor with small sums between ranks, whose boxes are one stream's. Two ranks
        # that send sums alone, in one kernel with the norm, take less than halves lose.
        few = self.own.sums_at_once and self.own.world_size <= turns.WHOLE and len(self.own.kvp_group) == 1
        whole = few or self.own.world_size == 1 or step.cu_q is None or step.staged is not None or cache.has_states
        if whole or step.dealt is not None or self._adds_squares or len(step.tokens) < 2 * turns.LEAST:
            *_, found = self._through(cache, step, policy, until_attention)
            assert found is not None
            return [found]
        return [*self.turns.run(*(self._through(cache, half, policy, until_attention) for half in step.halves()))]

    def _through(
        self, cache: KVCache, step: Step, policy: AttentionPolicy, until_attention: bool
    ) -> Iterator[tuple[Any, ...] | None]:
        """Yields between the turns of `states` (`comm.turns.Turns`): KV is appended a turn before it is attended.

        Turns end where messages do, or where products that hide the other half's do. What is yielded last are the
        states, with those of `DecoderSpec.taps` beside; or `until_attention` of the last layer, its queries and input.
        """
        x: Tensor | None = None
        rows, tapped = step.dealt, dict[int, Tensor]()
        parts: Tensor | PendingSum = self._embedded(step.tokens)
        angles_of = [rotary.angles(step.positions) for rotary in self.rotary]
        policy.prepare(step, set(self.spec.windows))
        if rows is not None and isinstance(first := self.layers[0].mixer, MLA):
            first.gather_ahead(cache, rows)
        guesses = policy.guesses and step.cu_q is None
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            normed, x = layer.input_norm(parts, x, rows)
            self.layers_run += 1
            yield None
            angles = angles_of[layer.rope]
            if layer.index in self.spec.taps:
                tapped[layer.index] = x
            if guesses and following is not None and following.index in self.full:
                queries = partial(following.queries, x, angles_of[following.rope], cache, step)
                policy.guess(queries, cache.layer(following.index), step)
            q = layer.mixer.project(normed, angles, cache, step)
            if until_attention and following is None:
                yield q, x
                return
            if rows is not None and following is not None and isinstance(following.mixer, MLA):
                with self.turns.beside():
                    following.mixer.gather_ahead(cache, rows)
            yield None
            parts = layer.mixer.finish(q, cache, step, policy)
            yield None
            normed, x = layer.ffn_norm(parts, x, rows)
            yield None
            parts = layer.feed(normed if rows is None else all_rows(rows, self.own, normed), step)
            yield None
        normed, tapped[len(self.layers)] = self.norm(parts, x, rows)
        found = torch.cat([normed, *(tapped[i] for i in self.spec.taps)], 1) if self.spec.taps else normed
        yield (found if rows is None else all_rows(rows, self.own, found),)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Computes this rank's parts [N, H] of the embedded tokens [N]."""
        parts = self.embedding(tokens)
        return parts if self._embedding_scale == 1 else parts.mul_(self._embedding_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits [n, V_local] fp32 of this rank's rows of the vocabulary, from hidden states [n, H]."""
        logits = self.head(hidden)
        return logits if self.spec.logit_scale == 1 else logits.mul_(self.spec.logit_scale)


def _selected(halves: Sequence[tuple[Any, ...]], rows: Tensor) -> tuple[Any, ...]:
    """Selects rows [n] of tensors, nested alike, whose rows come in one part or in two halves."""

    def select(parts: tuple[Any, ...]) -> Any:
        if parts[0] is None:
            return None
        if not isinstance(parts[0], Tensor):
            return type(parts[0])(*map(select, zip(*parts, strict=True)))
        if len(parts) == 1:
            return parts[0].index_select(0, rows)
        middle = len(parts[0])
        first = parts[0].index_select(0, rows.clamp(max=middle - 1))
        second = parts[1].index_select(0, (rows - middle).clamp(min=0))
        return torch.where((rows < middle).view(-1, *[1] * (first.dim() - 1)), first, second)

    return tuple(map(select, zip(*halves, strict=True)))
