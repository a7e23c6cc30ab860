"""Joining the other processes, from what the environment tells."""

MEGASCALE = {"MEGASCALE_COORDINATOR_ADDRESS": "host", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
