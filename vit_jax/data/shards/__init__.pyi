from .duplicates import MAX_DISTANCE as MAX_DISTANCE
from .files import ShardSet as ShardSet
from .files import check_cache_room as check_cache_room
from .files import find_shards as find_shards
from .files import read_record as read_record
from .files import shards_of_split as shards_of_split
from .manifest import MANIFEST_NAME as MANIFEST_NAME
from .packing import plan_packing as plan_packing
