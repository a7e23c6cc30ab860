from .page import format_page as format_page
from .paper import PaperNumber as PaperNumber
from .paper import find_paper_number as find_paper_number
from .record import Record as Record
from .record import make_record as make_record
from .record import read_records as read_records
from .record import write_record as write_record
from .run_folder import find_runs as find_runs
