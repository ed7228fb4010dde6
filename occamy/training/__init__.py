"""Training: the megatron-core policy, packing, losses, loops (SFT, HDPO, SAO), checkpoints and their launch."""
