from .archive import Archive as Archive
from .opening import WRITTEN_DTYPES as WRITTEN_DTYPES
from .opening import open_archive as open_archive
from .opening import write_archive as write_archive
