from .kinds import Label as Label
from .kinds import Source as Source
from .kinds import SourceConfig as SourceConfig
from .kinds import open_source as open_source
from .kinds import open_split as open_split
from .kinds import parse_source as parse_source
from .kinds import split_names as split_names
