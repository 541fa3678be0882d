"""
Write runtime/unicode.h: the classes of characters by which byte-level BPE splits a text into words.

    pip install unicodedata2==16.0.0 && python runtime/unicode.py > runtime/unicode.h

unicodedata2 pins Unicode 16.0, which the regular expressions of `tokenizers` 0.23 use. Without it,
Python's own unicodedata is used, whose version may differ: compare the first line of the output.
"""
import textwrap

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

# Unicode's property White_Space, unchanged since version 6.3; unicodedata does not have it.
SPACES = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F,
          0x205F, 0x3000}
OTHER, LETTER, NUMBER, WHITE_SPACE = range(4)  # as in the enum of unicode.h
CLASSES = {"L": LETTER, "N": NUMBER}  # by the first letter of the general category


def class_of(c):
    """Return the class of the character with code point c."""
    if c in SPACES:
        return WHITE_SPACE
    return CLASSES.get(unicodedata.category(chr(c))[0], OTHER)


def main():
    runs = [c << 2 | class_of(c) for c in range(0x110000)
            if c == 0 or class_of(c) != class_of(c - 1)]
    words = [f"0x{run:x}," for run in runs]
    lines = textwrap.wrap(" ".join(words), 96)
    version = unicodedata.unidata_version
    print(f"""// Characters by class, from Unicode {version}. Written by runtime/unicode.py.
#ifndef LLAMAC_UNICODE_H
#define LLAMAC_UNICODE_H

#include <stdint.h>

enum {{ OTHER, LETTER, NUMBER, WHITE_SPACE }}; // general categories L and N, property White_Space

// Each run of consecutive characters of one class, in ascending order: the first code point of the
// run, times 4, plus the class.
// clang-format off
static const uint32_t unicode_runs[{len(runs)}] = {{""")
    print(*("    " + line for line in lines), sep="\n")
    print("};\n// clang-format on\n\n#endif")


if __name__ == "__main__":
    main()
