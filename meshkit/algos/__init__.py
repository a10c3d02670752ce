"""Post-training: SFT, preferences, policies (RL), rollouts, rewards, dataflow, distillation, weight sync."""
