from .near_duplicates import MAX_DISTANCE as MAX_DISTANCE
from .shard_writer import WrittenShards as WrittenShards
from .shard_writer import make_shard_writer as make_shard_writer
