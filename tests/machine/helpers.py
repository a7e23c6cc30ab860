"""What the tests of the checks share."""


def touch(path):
    """Makes a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def marks(findings):
    """Subject -> mark."""
    return {finding.subject: finding.mark for finding in findings}
