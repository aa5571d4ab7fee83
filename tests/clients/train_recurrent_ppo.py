"""Trains sb3-contrib's RecurrentPPO on CartPole: five rollouts of 32 actions, four steps after
each."""

from recording import CLIP, STEPS, record
from sb3_contrib import RecurrentPPO


def train(flashcell):
    program = RecurrentPPO(
        "MlpLstmPolicy",
        "CartPole-v1",
        n_steps=32,
        batch_size=16,
        n_epochs=2,
        max_grad_norm=CLIP,
        policy_kwargs={"lstm_hidden_size": 16},
        seed=0,
        device="cpu",
    )
    flashcell.replace(program.policy)
    program.learn(total_timesteps=32 * STEPS // 4)
    return program.policy


if __name__ == "__main__":
    record(train)
