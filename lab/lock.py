"""One process at a time writes to a folder."""
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

LOCK = ".lock"  # an empty file, held open by the process that writes to its folder


def lock(folder):
    """The lock of a folder, as an open file. Until it is closed, every other call raises ValueError, in this
    process and in others. The system closes it when its process ends, even if that is killed; the empty file
    that stays locks nothing."""
    file = open(folder / LOCK, "ab")
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        file.close()
        raise ValueError(f"{folder}: another process is writing here: wait, or name another --out") from None
    return file
