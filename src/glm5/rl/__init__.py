"""Reinforcement learning: rollouts of an engine, and policy gradients on what it sampled."""
