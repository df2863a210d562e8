"""Reinforcement learning on packed rollouts through graphs, in the shape of GRPO.

    python examples/grpo_loop.py --steps 20

Sampling, old log-probabilities (both without gradients) and new ones (with) replay graphs of one
module. The task is a toy: say the prompt's token again. Runs on a GPU, or in under a minute on a
CPU. `--eager` does the same without graphs; every loss and reward is equal bit by bit.
"""

import argparse
import contextlib

import torch
from torch import Tensor

import packgraph
from packgraph.models.decoder import DecoderConfig, DecoderModel

WORDS, LENGTH, GROUP = 4, 4, 8  # of the vocabulary; tokens that are sampled; rollouts of a prompt
PROMPTS = 4
CAPACITY = packgraph.Capacity(tokens=PROMPTS * GROUP * (LENGTH + 1), documents=PROMPTS * GROUP)
CLIP, ENTROPY, UPDATES = 0.2, 0.003, 2
CONFIG = DecoderConfig(
    vocab_size=WORDS,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)


@torch.no_grad()
def sample(policy: torch.nn.Module, prompts: list[int], device: str) -> list[list[int]]:
    """A rollout for each prompt, of one token, all packed in one row."""
    rollouts = [[word] for word in prompts]
    for _ in range(LENGTH):
        batch = packgraph.PackedBatch.build(rollouts, CAPACITY).to(device)
        hidden = policy(batch, output="hidden")
        last = batch.cu_seqlens[1 : len(rollouts) + 1] - 1
        chances = (hidden[last] @ policy.head_weight.t()).softmax(-1)
        words = chances.multinomial(1)[:, 0].tolist()
        rollouts = [[*tokens, word] for tokens, word in zip(rollouts, words, strict=True)]
    return rollouts


def advantages_of(rollouts: list[list[int]]) -> tuple[Tensor, float]:
    """How much better each rollout is than the others of its prompt, and the mean reward."""
    said = torch.tensor(rollouts)
    rewards = (said[:, 1:] == said[:, :1]).float().mean(1)
    groups = rewards.view(PROMPTS, GROUP)
    better = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return better.flatten(), float(rewards.mean())


def loss_of(new: Tensor, old: Tensor, entropy: Tensor, advantages: Tensor, count: int) -> Tensor:
    """The clipped loss, less a reward for entropy. All but `count` are float32 [T]."""
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain + ENTROPY * entropy).sum() / count


def main() -> list[tuple[float, float]]:
    """Train; the last loss and the mean reward of all steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="without graphs")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = packgraph.graph(DecoderModel(CONFIG, device=device), capacities=[CAPACITY], warmup=1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    with packgraph.eager("comparison") if options.eager else contextlib.nullcontext():
        for _ in range(options.steps):
            prompts = torch.randint(WORDS, (PROMPTS,)).repeat_interleave(GROUP).tolist()
            rollouts = sample(policy, prompts, device)
            advantages, reward = advantages_of(rollouts)
            batch = packgraph.PackedBatch.build(rollouts, CAPACITY).to(device)
            # by token; those of padding belong to a document behind the last, and have no label
            by_token = torch.cat((advantages, torch.zeros(1))).to(device)[batch.document_ids]
            with torch.no_grad():
                old = packgraph.logprobs(policy, batch)
            for _ in range(UPDATES):
                new, entropy = packgraph.logprobs(policy, batch, entropy=True)
                loss = loss_of(new, old, entropy, by_token, batch.num_loss_tokens)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append((float(loss.detach()), reward))
    print(policy.stats)
    print(f"reward {found[0][1]:.2f} -> {found[-1][1]:.2f}")
    return found


if __name__ == "__main__":
    main()
