"""Run our code on the golden inputs: `{name: tensor}` with the names of a case's expected values.

The docstring of each function of OURS says how the peers' values were made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from pipeline.algorithms.advantages import group_advantages, sequence_advantages, shaped_rewards
from pipeline.algorithms.algorithm import Variance
from pipeline.algorithms.divergence import chunk_sums, distillation_loss
from pipeline.algorithms.loss import estimate_kl, mask_mismatched_sequences, mismatch_metrics, policy_loss, sft_loss, value_loss
from pipeline.algorithms.pairs import reward_model_loss
from pipeline.algorithms.sections import GAEConfig, RewardScalingConfig, RewardShapingConfig
from pipeline.algorithms.token_advantages import keep_high_entropy, moments, normalization, standardize
from pipeline.algorithms.turn_credit import returns_to_go
from pipeline.algorithms.universal_logits import candidates, universal_logit_loss
from pipeline.config import (
    AdvantageConfig,
    DPOConfig,
    EnvironmentConfig,
    GRPOConfig,
    KTOConfig,
    LossConfig,
    PPOConfig,
    ValueLossConfig,
)
from pipeline.config.environments import RewardConfig
from pipeline.data.packing import pack
from pipeline.data.teacher_text import at_chunk_ends
from pipeline.data.token_alignment import chunk_numbers
from pipeline.roles.teacher_scores import for_tokens_of
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, Sample, TeacherTokens, TopK
from tests.algorithms.golden.files import Golden
from tests.algorithms.golden.rows import Rows, after, before, tensor
from tests.algorithms.groups import group_of, group_of_several, group_of_turns
from tests.algorithms.made import made

Found = dict[str, torch.Tensor]
SMALL = 1e-3  # gradients that should be 0 are rounding errors; they have no size to compare with


def _outputs(out: LossOutput, leaf: torch.Tensor) -> Found:
    """Return the loss, its gradient and the metrics."""
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    return {"loss": out.loss.detach(), "gradient": gradient} | {f"metrics of {k}": v for k, v in out.metrics.items()}


def _of_tokens(found: Found) -> Found:
    """Drop the first token of each row, which has no log-prob; peers' gradients leave it out."""
    return found | {"gradient": found["gradient"][:, 1:]}


def of_policy(golden: Golden) -> Found:
    """Compute the policy's loss.

    NeMo-RL: `ClippedPGLossFn(ClippedPGLossConfig(**arguments))` with `logprobs[:, 1:]`, which the gradient is of. `data` has
    `token_mask`, `sample_mask`, `advantages`, `prev_logprobs` (our `old_logprobs`), `generation_logprobs` and
    `reference_policy_logprobs`. `global_valid_seqs` is the sum of `sample_mask`, `global_valid_toks` that of
    `token_mask[:, 1:] * sample_mask`.

    verl: `compute_policy_loss_vanilla`, `_gspo`, `_cispo` and `_sapo` with `theirs` as the configuration and
    `loss_agg_mode`, and columns from 1 on. A GSPO case has one advantage for each sequence. The entropy bonus is `agg_loss` of
    minus the log-probs.
    """
    rows = Rows(golden.inputs)
    leaf = rows.leaf("logprobs")
    names = ("old_logprobs", "generate_logprobs", "reference_logprobs", "advantages")
    fields = {name: rows.tensor(name) for name in names if name in rows.inputs}
    if "advantages" in golden.more:  # of sequences
        fields["advantages"] = tensor(golden.more["advantages"])[:, None].expand(rows.mask.shape)
    outputs, config = Outputs(logprobs=rows.packed(leaf)), LossConfig(**golden.arguments)
    if golden.formula == "entropy bonus":
        # The log-probs stand for entropies too. With advantages of 0 nothing else is in the loss.
        fields["advantages"] = torch.zeros_like(leaf)
        config = LossConfig(entropy_coeff=1.0, disable_ppo_ratio=True)
        outputs = dataclasses.replace(outputs, entropy=rows.packed(leaf))
    return _of_tokens(_outputs(policy_loss(config, outputs, rows.batch(**fields), rows.counts), leaf))


def high_entropy(golden: Golden) -> Found:
    """Compute the policy's loss on the tokens of the highest entropy.

    TRL: `GRPOTrainer._compute_loss` with a trainer whose model returns the rows `logprobs` and `old_entropy`; one advantage for
    each sequence, and the batch's number of counted tokens as `num_items_in_batch`.
    """
    rows, config = Rows(golden.inputs), LossConfig(**golden.arguments)
    leaf = rows.leaf("logprobs")
    fields = {name: rows.tensor(name) for name in ("old_logprobs", "old_entropy")}
    fields["advantages"] = rows.tensor("advantages")[:, None].expand(rows.mask.shape)
    if config.reference_policy_kl_penalty:
        fields["reference_logprobs"] = rows.tensor("reference_logprobs")
    (batch,), _ = keep_high_entropy([rows.batch(**fields)], config.top_entropy_quantile, int)
    return _outputs(policy_loss(config, Outputs(logprobs=rows.packed(leaf)), batch, rows.counts), leaf)


def sft(golden: Golden) -> Found:
    """Compute the SFT loss. NeMo-RL: `NLLLossFn`, as in `of_policy`."""
    rows = Rows(golden.inputs)
    leaf = rows.leaf("logprobs")
    return _of_tokens(_outputs(sft_loss(Outputs(logprobs=rows.packed(leaf)), rows.batch(), rows.counts), leaf))


def dpo(golden: Golden) -> Found:
    """Compute DPO's loss.

    NeMo-RL: `DPOLossFn`, as in `of_policy`. `reference_policy_logprobs` are rolled by -1, as its trainer does. Rows are chosen,
    rejected, chosen, rejected and so on.

    TRL: `DPOTrainer._compute_loss` with a model that returns the given logits, and all chosen rows first, as its collator
    orders them. Conservative DPO is `aot_unpaired` on a single pair, where there is nothing to sort. SimPO and ORPO are of
    `CPOTrainer` and `ORPOTrainer` in `trl/experimental`: `get_batch_logps` with `average_log_prob=True` and labels of -100
    where the mask is 0, then the trainer's loss; of ORPO, the term of the odds alone.
    """
    rows = Rows(golden.inputs)
    config = DPOConfig(**({"sft_average_log_probs": False} | golden.arguments))
    if "logits" in rows.inputs:
        leaf = rows.leaf("logits")
        logprobs, reference = (_of_drawn(rows, logits) for logits in (leaf, rows.tensor("reference_logits")))
    else:
        leaf = rows.leaf("logprobs")
        logprobs, reference = leaf, rows.tensor("reference_logprobs")
    batch = rows.batch(reference_logprobs=reference)
    found = _outputs(made(config).loss(Outputs(logprobs=rows.packed(logprobs)), batch, rows.counts), leaf)
    return found if "logits" in rows.inputs else _of_tokens(found)


def kto(golden: Golden) -> Found:
    """Compute KTO's loss, with z0 of the mismatched answers `kl_...` (TRL averages over the answers of a microbatch).

    TRL: `KTOTrainer._compute_loss` with models that return the given logits, for `tokens` and for `kl_tokens`.
    """
    rows = Rows(golden.inputs)
    leaf = rows.leaf("logits")
    mismatched = Rows({name.removeprefix("kl_"): value for name, value in golden.inputs.items() if name.startswith("kl_")})
    ratios = _of_drawn(mismatched, mismatched.tensor("logits")) - _of_drawn(mismatched, mismatched.tensor("reference_logits"))
    algorithm, labels = made(KTOConfig(**golden.arguments)), tensor(golden.inputs["labels"])
    mean_kl = (ratios * mismatched.mask).sum(1).mean().clamp(min=0).item() if algorithm.needs.mismatched else 0.0
    reference = _of_drawn(rows, rows.tensor("reference_logits"))
    batch = rows.batch(reference_logprobs=reference, rewards=labels, mean_kl=mean_kl)
    counts = dataclasses.replace(rows.counts, good=int(labels.sum()))
    return _outputs(algorithm.loss(Outputs(logprobs=rows.packed(_of_drawn(rows, leaf))), batch, counts), leaf)


def _of_drawn(rows: Rows, logits: torch.Tensor) -> torch.Tensor:
    """Map `[B, S, V]` logits that follow each token to `[B, S]` log-probs of the tokens."""
    tokens = torch.tensor(rows.inputs["tokens"])[..., None]
    return before(logits.log_softmax(-1)).gather(-1, tokens)[..., 0]


def reward_model(golden: Golden) -> Found:
    """Compute the reward model's loss.

    NeMo-RL: `PreferenceLossFn` with `scores[:, None]` as logits. TRL: `RewardTrainer.compute_loss` with all chosen scores
    first, and `margin`.
    """
    scores = tensor(golden.inputs["scores"]).requires_grad_()
    # Sequences of two tokens, of which the second is the last.
    rows = Rows({"lengths": [2] * len(scores), "token_mask": [[0, 1]] * len(scores)})
    margins = torch.zeros(len(scores), dtype=torch.float64)
    if golden.arguments.get("margins"):
        margins[0::2] = tensor(golden.inputs["margins"])
    values = torch.stack([torch.full_like(scores, 9.0), scores], 1).flatten()
    return _outputs(reward_model_loss(Outputs(values=values), rows.batch(rewards=margins), rows.counts), scores)


def of_critic(golden: Golden) -> Found:
    """Compute the critic's loss; peers' values of a token are of the state before it.

    NeMo-RL: `MseValueLossFn(MseValueLossConfig(**arguments))` with `values`; `data["values"]` are `old_values`. verl:
    `compute_value_loss`.
    """
    rows = Rows(golden.inputs)
    leaf = rows.leaf("values")
    batch = rows.batch(old_values=after(rows.tensor("old_values")), returns=rows.tensor("returns"))
    outputs = Outputs(values=rows.packed(after(leaf)))
    return _outputs(value_loss(ValueLossConfig(**golden.arguments), outputs, batch, rows.counts), leaf)


def distillation(golden: Golden) -> Found:
    """Compute the loss from whole distributions, as backends return them.

    NeMo-RL: the `top_k` largest `teacher_logits` and their indices go with `student_logits` into
    `get_distillation_topk_logprobs_from_logits`, and what it returns into `DistillationLossFn`. The first of them casts logits
    to float32; that cast is a cast to float64 here.
    """
    rows, top_k = Rows(golden.inputs), golden.more["top_k"]
    leaf = rows.leaf("student_logits")
    student, teacher = (rows.packed(before(x)).log_softmax(-1) for x in (leaf, rows.tensor("teacher_logits")))
    best = teacher.topk(top_k)
    outputs = Outputs(
        entropy=torch.special.entr(student.exp()).sum(-1), top_k=TopK(best.indices, student.gather(-1, best.indices))
    )
    batch = rows.batch(teacher=TopK(best.indices, best.values))
    return _outputs(distillation_loss(LossConfig(**golden.arguments), outputs, batch, rows.counts), leaf)


def kl(golden: Golden) -> Found:
    """Estimate the KL; the gradient is of the sum.

    NeMo-RL: `calculate_kl(logprobs, reference_logprobs, **arguments)`. verl: `kl_penalty`.
    """
    arguments = {"input_clamp_value": 20.0, "output_clamp_value": 10.0} | golden.arguments  # defaults, ours and theirs
    leaf = tensor(golden.inputs["logprobs"]).requires_grad_()
    bounds = arguments["input_clamp_value"], arguments["output_clamp_value"]
    values = estimate_kl(leaf, tensor(golden.inputs["reference_logprobs"]), arguments["kl_type"], *bounds)
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return {"values": values.detach(), "gradient": gradient}


def advantages(golden: Golden) -> Found:
    """Compute advantages of groups.

    NeMo-RL: `GRPOAdvantageEstimator.compute_advantage` for each group alone. verl: `compute_grpo_outcome_advantage` and
    `compute_rloo_outcome_advantage`.
    """
    leave_one_out, normalize = (golden.arguments[name] for name in ("use_leave_one_out_baseline", "normalize_rewards"))
    return {
        f"values of {name}": torch.from_numpy(group_advantages(np.array(rewards, np.float64), leave_one_out, normalize))
        for name, rewards in golden.inputs["groups"].items()
    }


def returns(golden: Golden) -> Found:
    """Compute the returns of turns. rLLM: `compute_mc_return` of each episode."""
    discount = golden.arguments["turn_discount"]
    return {
        f"values of {name}": torch.from_numpy(np.concatenate([returns_to_go(np.array(rewards), discount) for rewards in turns]))
        for name, turns in golden.inputs["turns"].items()
    }


def turn_advantages(golden: Golden) -> Found:
    """Compute the advantages of turns.

    verl: `compute_grpo_outcome_advantage` of the turns of all episodes of a prompt, with their returns by rLLM (`returns`) as
    rewards, and their numbers as the index.
    """
    algorithm, found = made(GRPOConfig(credit="turn", **golden.arguments)), {}
    for name, turns in golden.inputs["turns"].items():
        group, rewards = group_of_turns(turns), np.array([sum(of_turns) for of_turns in turns])
        advantages = algorithm.turn_advantages(group, rewards, np.zeros(len(turns)))
        found[f"values of {name}"] = torch.from_numpy(np.concatenate(list(advantages)))
    return found


def tool_calls(golden: Golden) -> Found:
    """Compute the advantages of the policy's tokens where turns are malformed.

    NeMo-RL: `_apply_message_level_advantage_penalties` with `advantages` of sequences. A sequence has a prompt of two tokens,
    turns of two, and a tool's message of one between two turns. `malformed` is `is_invalid_tool_call` of each turn.
    """
    group = group_of_turns(golden.inputs["turns"], golden.inputs["malformed"])
    rewards, of_episodes = np.array([rollout.reward for rollout in group.rollouts]), np.array(golden.inputs["advantages"])
    of_turns = made(GRPOConfig(**golden.arguments)).turn_advantages(group, rewards, of_episodes)
    return {"values": torch.from_numpy(np.concatenate(list(of_turns)).repeat(2))}


def gdpo(golden: Golden) -> Found:
    """Compute GDPO's advantages of a step.

    NeMo-RL: `GDPOAdvantageEstimator.compute_advantage` with `prompts[:, None]`, a mask of one token each, and the rewards as
    `reward/NAME` of the batch.
    """
    prompts, rewards = golden.inputs["prompts"], golden.inputs["rewards"]
    weights = golden.arguments.get("reward_weights") or [1.0] * len(rewards)
    of_environment = [RewardConfig(f"my.{name}", weight) for name, weight in zip(rewards, weights, strict=True)]
    switches = {name: golden.arguments[name] for name in ("normalize_rewards", "use_leave_one_out_baseline")}
    config = GRPOConfig(adv_estimator=AdvantageConfig("gdpo"), **switches)
    groups = []
    for prompt in dict.fromkeys(prompts):
        rows = [row for row, of in enumerate(prompts) if of == prompt]
        groups.append(group_of_several([{name: values[row] for name, values in rewards.items()} for row in rows]))
    samples = made(config, env={"math": EnvironmentConfig(rewards=of_environment)}).compute_advantages(groups)
    return {"values": torch.tensor([float(sample.advantages[-1]) for sample in samples], dtype=torch.float64)}


def reinforce_plus_plus(golden: Golden) -> Found:
    """Compute REINFORCE++'s advantages.

    NeMo-RL: `compute_advantage` of the estimator, with `token_mask` as the mask and, for KL in the reward, `old_logprobs` and
    `reference_logprobs`. `advantages` are kept where the mask is 1. verl: see `estimates`.
    """
    rows, loss = Rows(golden.inputs), _loss(golden.arguments)
    minus_baseline = golden.arguments["minus_baseline"]
    estimator = AdvantageConfig("reinforce_plus_plus", minus_baseline=minus_baseline)
    prompts, rewards = np.array(rows.inputs["prompts"]), np.array(rows.inputs["rewards"], np.float64)
    of_sequences = torch.zeros(len(rewards), dtype=torch.float64)
    for prompt in set(prompts.tolist()):
        of_sequences[prompts == prompt] = torch.from_numpy(sequence_advantages(rewards[prompts == prompt], minus_baseline))
    algorithm = made(GRPOConfig(adv_estimator=estimator), loss)
    batch = rows.batch(
        advantages=torch.where(rows.mask, of_sequences[:, None], 0.0),
        old_logprobs=rows.tensor("old_logprobs"),
        reference_logprobs=rows.tensor("reference_logprobs"),
    )
    # verl divides by the unbiased deviation, NeMo-RL by the biased one.
    found = _standardized(algorithm.estimate(batch), "unbiased" if golden.peer == "verl" else algorithm.needs.standardized)
    return {"advantages": rows.padded(found.advantages)}


def opd(golden: Golden) -> Found:
    """Return the advantages from a teacher's log-probs as "values", and the loss with them.

    NeMo-RL: `OPDAdvantageEstimator.compute_advantage` with `teacher_logprobs`, `old_logprobs` as `prev_logprobs` and
    `token_mask * sample_mask` as the mask gives `values`, which are the advantages of `policy_loss`. `teacher_kl` is minus its
    `teacher_student_logprob_gap_mean`.
    """
    rows = Rows(golden.inputs)
    leaf = rows.leaf("logprobs")
    algorithm = made(GRPOConfig(adv_estimator=AdvantageConfig("opd")), LossConfig(**golden.arguments))
    fields = {name: rows.tensor(name) for name in ("old_logprobs", "generate_logprobs", "teacher_logprobs")}
    batch = algorithm.estimate(rows.batch(**fields))
    found = _outputs(algorithm.loss(Outputs(logprobs=rows.packed(leaf)), batch, rows.counts), leaf)
    return _of_tokens(found) | {"values": rows.padded(batch.advantages)}


def opd_chunks(golden: Golden) -> Found:
    """Compute the loss with advantages from a teacher's log-probs of chunks.

    On-Policy-Distill: `compute_policy_loss_opd` with `old_logprobs` as both log-probs, `teacher_logprobs` (which add up to a
    chunk's) and `chunks` side by side as advantages, `token_mask`, a clip ratio of 0.2 and a `clip_ratio_c` of 1e9.
    """
    rows = Rows(golden.inputs)
    leaf = rows.leaf("old_logprobs")
    names, first = [int(number) for number in rows.packed(rows.tensor("chunks"))], {}
    row_of = [row for row, length in enumerate(rows.lengths) for _ in range(length)]
    keys = [
        (row, number if number >= 0 else f"token {place}")
        for place, (row, number) in enumerate(zip(row_of, names, strict=True))
    ]
    chunks = torch.tensor([first.setdefault(key, place) for place, key in enumerate(keys)])
    teacher = chunk_sums(rows.packed(torch.where(rows.mask, rows.tensor("teacher_logprobs"), 0.0)), chunks)
    algorithm = made(GRPOConfig(adv_estimator=AdvantageConfig("opd")), LossConfig(**golden.arguments))
    batch = algorithm.estimate(rows.batch(old_logprobs=leaf.detach(), teacher_logprobs=teacher, chunks=chunks))
    return _outputs(algorithm.loss(Outputs(logprobs=rows.packed(leaf)), batch, rows.counts), leaf)


def uld(golden: Golden) -> Found:
    """Compute ULD's and GOLD's loss of one answer from whole distributions, as train ranks return them.

    TRL: `ULDLoss` with `theirs` as the configuration, weights of 1 for the rest, no end of the answers to skip, `prompt` and
    `teacher_prompt` labels of -100, and the vocabularies in the order of their ids. Token t of `student` and `teacher` is the
    text of `tokens[t]` and `teacher_tokens[t]`; `logits` follow each token.
    """
    inputs, config = golden.inputs, LossConfig(**golden.arguments)
    begin, of_teacher = inputs["prompt"], inputs["teacher_prompt"]
    ends = [
        2 * np.cumsum([len(text) for text in texts]) for texts in (inputs["student"][begin:], inputs["teacher"][of_teacher:])
    ]
    chunks, theirs = (
        np.concatenate([np.full(skip, -1), numbers]).astype(np.int32)
        for skip, numbers in zip((begin, of_teacher), chunk_numbers(*ends), strict=True)
    )
    zeros = np.zeros(len(chunks), np.float32)
    in_teacher = TeacherTokens(np.array(inputs["teacher_tokens"], np.int32), theirs, chunks)
    sample = at_chunk_ends(Sample(np.array(inputs["tokens"], np.int32), chunks >= 0, zeros, zeros, in_teacher=in_teacher))
    leaf = tensor(inputs["logits"]).requires_grad_()
    student, teacher = (before(logits[None]).log_softmax(-1)[0] for logits in (leaf, tensor(inputs["teacher_logits"])))
    width = max(student.shape[1], teacher.shape[1])
    drawn = teacher.gather(-1, torch.tensor(inputs["teacher_tokens"])[:, None])[:, 0]
    _, tokens, of_tokens = for_tokens_of([drawn, *_top(teacher, width)], sample)
    own = TopK(*_top(student.detach(), width))
    matched = torch.tensor(inputs["matched"]) if config.kl_type == "gold" else None
    compared = candidates(TopK(tokens, of_tokens), own, matched)
    batch = dataclasses.replace(pack([sample], "cpu"), teacher=compared)
    picked = student.gather(-1, compared.tokens.clamp(min=0))
    of_drawn = student.gather(-1, batch.tokens[:, None])[:, 0]
    outputs = Outputs(logprobs=torch.where(torch.arange(len(student)) > 0, of_drawn, 0.0), top_k=TopK(compared.tokens, picked))
    counts = GlobalCounts(int(sample.loss_mask.sum()), 1)
    return _outputs(universal_logit_loss(config, outputs, batch, counts), leaf)


def _top(logprobs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all tokens of `[T, V]` log-probs, the most likely first, and their log-probs, with -1 and -inf up to the width."""
    values, tokens = logprobs.sort(-1, descending=True)
    room = (0, width - logprobs.shape[1])
    return pad(tokens, room, value=-1), pad(values, room, value=-torch.inf)


def gae(golden: Golden) -> Found:
    """Compute GAE's advantages and returns. NeMo-RL: as in `reinforce_plus_plus`."""
    rows, loss = Rows(golden.inputs), _loss(golden.arguments)
    names = {field.name for field in dataclasses.fields(GAEConfig)}
    config = GAEConfig(**{name: value for name, value in golden.arguments.items() if name in names})
    fields = {name: rows.tensor(name) for name in ("old_logprobs", "reference_logprobs") if name in rows.inputs}
    if "token_rewards" in rows.inputs:
        credit, fields["advantages"] = "turn", rows.tensor("token_rewards")
    else:
        credit, fields["rewards"] = "episode", rows.tensor("rewards")
    algorithm = made(PPOConfig(adv_estimator=config, credit=credit), loss, updates=1)
    batch = rows.batch(old_values=after(rows.tensor("values")), **fields)
    found = _standardized(algorithm.estimate(batch), algorithm.needs.standardized)
    return {"advantages": rows.padded(found.advantages), "returns": rows.padded(found.returns)}


def estimates(golden: Golden) -> Found:
    """Compute verl's estimates: token-level rewards go into the named function.

    They are 0 but for `rewards` at each row's last counted token, less the penalty times k1 with KL in the reward; in
    `turn_estimates` they are `token_rewards`.
    """
    return (gae if golden.formula.startswith("GAE") else reinforce_plus_plus)(golden)


def _loss(arguments: dict[str, Any]) -> LossConfig:
    names = {field.name for field in dataclasses.fields(LossConfig)}
    return LossConfig(**{name: value for name, value in arguments.items() if name in names})


def _standardized(batch: PackedBatch, variance: Variance | None) -> PackedBatch:
    return standardize(batch, normalization([[moments([batch])]], variance))


def rewards(golden: Golden) -> Found:
    """Shape rewards.

    NeMo-RL: `scale_rewards` and `apply_reward_shaping` on `rewards`, with `lengths` as `response_token_lengths` and
    `truncated`.
    """
    inputs, arguments = golden.inputs, golden.arguments
    group = group_of(inputs["rewards"], inputs["lengths"], inputs["truncated"])
    if golden.formula.startswith("reward scaling"):
        config = GRPOConfig(reward_scaling=RewardScalingConfig(enabled=True, **arguments))
    else:
        config = GRPOConfig(reward_shaping=RewardShapingConfig(enabled=True, **arguments))
    return {"values": torch.from_numpy(shaped_rewards(group, config))}


def mismatch(golden: Golden) -> Found:
    """Return the sequences that are still included, and the metrics for them.

    NeMo-RL: `compute_and_apply_seq_logprob_error_masking` with `seq_logprob_error_threshold`. Not compared: its
    `sampling_importance_ratio`, which is the mean of the weights after they are truncated and ours of those before; and its
    mean of the weights of sequences (GSPO), which sums over all pairs of sequences.
    """
    rows = Rows(golden.inputs)
    batch = rows.batch(old_logprobs=rows.tensor("old_logprobs"), generate_logprobs=rows.tensor("generate_logprobs"))
    left = rows.padded(mask_mismatched_sequences(batch, golden.arguments["seq_logprob_error_threshold"]).to(torch.float64))
    metrics = mismatch_metrics(batch.old_logprobs, batch, rows.counts)
    return {"sample_mask": left.amax(1)} | {f"metrics of {name}": value for name, value in metrics.items()}


OURS: dict[str, Callable[[Golden], Found]] = {
    "advantages": advantages,
    "distillation": distillation,
    "dpo": dpo,
    "estimates": estimates,
    "gae": gae,
    "gdpo": gdpo,
    "high_entropy": high_entropy,
    "kl": kl,
    "kto": kto,
    "mismatch": mismatch,
    "opd": opd,
    "opd_chunks": opd_chunks,
    "policy_loss": of_policy,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reward_model": reward_model,
    "returns": returns,
    "rewards": rewards,
    "sft": sft,
    "tool_calls": tool_calls,
    "turn_advantages": turn_advantages,
    "turn_estimates": estimates,
    "uld": uld,
    "value_loss": of_critic,
}


def deliberate(golden: Golden) -> str:
    """Return why our formula differs on purpose; "" if it does not."""
    if golden.peer == "NeMo-RL" and golden.kind == "reinforce_plus_plus" and golden.arguments["use_kl_in_reward"]:
        return "a token answers for the KL from itself on, as in the paper and in verl; in NeMo-RL for its own alone"
    return ""


def difference(golden: Golden) -> float:
    """Return our largest difference from theirs, relative to the largest entry of the tensor; of small ones, to `SMALL`."""
    found, largest = OURS[golden.kind](golden), 0.0
    for name, theirs in golden.expected.items():
        ours = found[name]
        assert ours.shape == theirs.shape, f"{golden.name}: {name} is {tuple(ours.shape)}, theirs {tuple(theirs.shape)}"
        if name == "gradient" and golden.arguments.get("sequence_level_importance_ratios") and golden.peer != "verl":
            # GSPO-token's gradient differs within a sequence with several advantages, and not in its sum.
            ours, theirs = ours.sum(-1), theirs.sum(-1)
        scale = max(theirs.abs().max().item(), SMALL)
        largest = max(largest, (ours - theirs).abs().max().item() / scale)
    return largest
