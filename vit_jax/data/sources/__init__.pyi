from .kinds import list_splits as list_splits
from .kinds import open_source as open_source
from .kinds import open_split as open_split
from .kinds import parse_source as parse_source
from .source import Label as Label
from .source import Source as Source
from .source import SourceConfig as SourceConfig
