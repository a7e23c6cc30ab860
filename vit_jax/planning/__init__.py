"""What a run would need and cost, before there are devices to run it on."""
