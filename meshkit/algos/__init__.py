"""Post-training: SFT, preferences, policies (RL), rollouts, rewards, dataflow, weight sync (reallocate, shardcast)."""
