"""Read UTF-8 files block by block; the errors of files that contain no text."""
from tqdm import tqdm

from engine.streams import one_line
from engine.untrusted import open_untrusted

BLOCK = 1 << 22     # bytes to read at a time
MAX_LINE = 1 << 26  # max bytes of a line of .jsonl, a field of a table, an object of a .json list


class Unfit(Exception):
    """
    A file or source that cannot be prepared.

    `fail` would end the program before progress bars are closed and before the other files of a
    folder are examined. reason: what was found; advice: what was expected, or what to do.
    """

    def __init__(self, reason, advice=""):
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self.reason = reason


class NotUTF8(Unfit):
    """A file that is not UTF-8 text: the byte at an offset is invalid UTF-8, or zero."""

    def __init__(self, byte, offset):
        reason = f"no text (a zero byte at offset {offset})"
        if byte:
            reason = f"not UTF-8 (byte 0x{byte:02x} at offset {offset})"
        super().__init__(reason, "expected UTF-8 text")
        self.byte, self.offset = byte, offset


def blocks(path, whole_lines, update=lambda size: None):
    """
    Yield (offset in the file, bytes) of a UTF-8 file, about BLOCK bytes at a time. Raises NotUTF8.

    A block ends after a line. A line longer than BLOCK is cut between two characters; with
    whole_lines the block grows instead, up to MAX_LINE. update: called with the size of each block.
    """
    offset, rest = 0, b""
    with open_untrusted(path) as f:
        while True:
            fresh = f.read(BLOCK)
            block = rest + fresh
            cut = block.rfind(b"\n") + 1
            if not cut and not whole_lines:
                cut = block.rfind(b"\r") + 1  # the line end of old Macs
            if not fresh:
                cut = len(block)
            elif not cut and whole_lines:
                if len(block) > MAX_LINE:
                    raise Unfit(f"a line of more than {MAX_LINE >> 20} MB at offset {offset}",
                                "expected a document a line")
                rest = block
                continue
            elif not cut:  # a character has at most 4 bytes
                cut = character_start(block, max(0, len(block) - 4))
            check_utf8(block[:cut], offset)
            if cut:
                yield offset, block[:cut]
            update(cut)
            if not fresh:
                return
            offset, rest = offset + cut, block[cut:]


def check_utf8(block, offset):
    """Raise NotUTF8 if the bytes at an offset of a file are not UTF-8 text."""
    wrong = block.find(b"\0")
    try:
        block.decode()
    except UnicodeDecodeError as e:
        wrong = e.start if wrong < 0 else min(wrong, e.start)
    if wrong >= 0:
        raise NotUTF8(block[wrong], offset + wrong)


def character_start(block, at):
    """Return the first position at or after `at` where a UTF-8 character starts, or the end."""
    while at < len(block) and block[at] & 0xC0 == 0x80:
        at += 1
    return at


def progress(words, total, unit="B"):
    """Return a progress bar that appears after one second and is erased at the end."""
    return tqdm(desc=words, total=total, unit=unit, unit_scale=unit == "B", leave=False, delay=1,
                dynamic_ncols=True)


def listed(words, max_words=8):
    """Join the first words of a list with commas."""
    words = [one_line(word) for word in words]
    more = ["..."] if len(words) > max_words else []
    return ", ".join(words[:max_words] + more)
