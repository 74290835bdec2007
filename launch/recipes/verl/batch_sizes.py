"""Translate batch sizes: prompts and answers of a step, updates in it, and microbatches."""

from __future__ import annotations

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator
from launch.recipes.verl.verl_defaults import ACTOR, REF, ROLLOUT

GLOBAL_MICRO = "microbatches of all GPUs together"
RULES = (
    Done("data.train_batch_size data.gen_batch_size"),
    Done(f"{ACTOR}.ppo_mini_batch_size {ACTOR}.ppo_epochs {ACTOR}.use_dynamic_bsz"),
    Only(
        f"{ACTOR}.ppo_micro_batch_size {ROLLOUT}.log_prob_micro_batch_size {REF}.log_prob_micro_batch_size"
        " critic.ppo_micro_batch_size critic.forward_micro_batch_size",
        (None,),
        GLOBAL_MICRO,
        "the key of the same name with _per_gpu",
    ),
    Ignored(f"{ACTOR}.rollout_n {REF}.rollout_n critic.rollout_n {ACTOR}.data_loader_seed critic.data_loader_seed"),
    Changed(f"{ACTOR}.shuffle critic.shuffle", (False, None), "the samples of a step are not shuffled between its updates"),
    # The passes of the reference policy and of a critic use the policy's microbatches.
    Ignored(f"{REF}.log_prob_micro_batch_size_per_gpu {REF}.log_prob_use_dynamic_bsz {REF}.log_prob_max_token_len_per_gpu"),
    Ignored(f"{ROLLOUT}.log_prob_use_dynamic_bsz {ROLLOUT}.log_prob_max_token_len_per_gpu"),
    Ignored("critic.ppo_micro_batch_size_per_gpu critic.ppo_max_token_len_per_gpu critic.use_dynamic_bsz"),
    Ignored("critic.forward_micro_batch_size_per_gpu critic.forward_max_token_len_per_gpu"),
    Ignored("trainer.balance_batch"),
)


def translate(t: Translator, algorithm: str, sequence_ranks: int) -> None:
    """Translate the sizes. sequence_ranks: ranks that share a sequence, by Ulysses or context parallelism.

    verl counts prompts in train_batch_size and ppo_mini_batch_size; an update here counts answers.
    """
    prompts, answers = t.consume("data.train_batch_size"), t.consume(f"{ROLLOUT}.n")
    updated = t.consume(f"{ACTOR}.ppo_mini_batch_size")
    t.put(f"{algorithm}.num_prompts_per_step", prompts, "data.train_batch_size")
    t.put(f"{algorithm}.num_generations_per_prompt", answers, f"{ROLLOUT}.n")
    if isinstance(updated, int) and isinstance(answers, int):
        t.put("policy.train_global_batch_size", updated * answers, f"{ACTOR}.ppo_mini_batch_size")
        if t.origins.get(f"{ACTOR}.ppo_mini_batch_size"):
            text = f"an update has {updated} prompts x {answers} answers, policy.train_global_batch_size={updated * answers}"
            t.change(f"{ACTOR}.ppo_mini_batch_size={updated}", text)
    epochs = t.consume(f"{ACTOR}.ppo_epochs")
    if algorithm == "ppo":
        t.put("ppo.ppo_epochs", epochs, f"{ACTOR}.ppo_epochs")
    elif epochs != 1:
        t.lacks(f"{ACTOR}.ppo_epochs", epochs, "several passes over a step's samples without a critic", "1")
    _microbatches(t, sequence_ranks)
    apply(t, RULES)


def _microbatches(t: Translator, sequence_ranks: int) -> None:
    dynamic, key = t.consume(f"{ACTOR}.use_dynamic_bsz"), f"{ACTOR}.ppo_max_token_len_per_gpu"
    tokens, size = t.consume(key), t.consume(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    scored_key, tokens_key = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
    scored, scored_tokens = t.consume(scored_key), t.get(tokens_key, tokens)
    t.put("policy.sequence_packing.enabled", dynamic, f"{ACTOR}.use_dynamic_bsz")
    if dynamic and isinstance(tokens, int):
        t.put("policy.sequence_packing.train_mb_tokens", tokens * sequence_ranks, key)
        if isinstance(scored_tokens, int):
            t.put("policy.sequence_packing.logprob_mb_tokens", scored_tokens * sequence_ranks, tokens_key)
        if sequence_ranks > 1:
            text = f"a microbatch has {tokens * sequence_ranks} tokens, which {sequence_ranks} ranks share"
            t.change(f"{key}={tokens}", text)
    elif not dynamic:
        if size is None:
            message = "got null with use_dynamic_bsz=false; expected a number of answers, which verl requires too"
            t.problem(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "missing-value", message)
            return
        t.put("policy.train_micro_batch_size", size, f"{ACTOR}.ppo_micro_batch_size_per_gpu")
        t.put("policy.logprob_batch_size", scored or size, scored_key)
