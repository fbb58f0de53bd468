"""For the custodian of private data: which private records have copies in a public data set.

These functions read both sets in the clear. What they find is outside the privacy guarantee, and no part of training
imports this module.
"""

from halfsilver.overlap.files import overlap_of_files
from halfsilver.overlap.images import overlap_of_images
from halfsilver.overlap.match import Match, Overlap, Side
from halfsilver.overlap.tables import overlap_of_rows
from halfsilver.overlap.text import overlap_of_lines

__all__ = ["Match", "Overlap", "Side", "overlap_of_files", "overlap_of_images", "overlap_of_lines", "overlap_of_rows"]
