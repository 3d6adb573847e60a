"""Why a figure that is no result of this repository may stand on a page."""

PAPER = "quoted from the COAT paper"
OTHER_RUN = "measured by the authors in a run that wrote no results file here: the page says so"
PUBLISHED = "quoted from the publication that the page names"
SETTING = "a constant of the code, of another program, or of a published recipe"
TESTED = "asserted by a test"
ARITHMETIC = "follows from a definition on the page"
AIM = "a limit that the project sets itself, not a result"
