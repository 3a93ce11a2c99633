"""The data axis: ZeRO stages 0 to 3 and hybrid sharding on torch's DDP and FSDP2."""
