"""How many files this process may have open."""

import contextlib

MANY = 8192  # files; macOS allows 10,240 even where it states no limit
FEW = 512  # files, which Windows allows


def raise_open_files_limit() -> int:
    """Lets this process, and those that it starts, have as many files open as the system allows, up to `MANY`.

    The limit that a shell sets is often 1,024, on macOS 256, and may be raised. Returns the number of files that may be
    open now.
    """
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return FEW
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if hard == resource.RLIM_INFINITY else min(hard, MANY)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # another limit of the system is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return MANY if soft == resource.RLIM_INFINITY else soft
