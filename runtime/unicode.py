"""
Write runtime/unicode.h: the classes of characters that byte-level BPE uses to split words.

    pip install unicodedata2==16.0.0 && python runtime/unicode.py > runtime/unicode.h

The regular expressions of `tokenizers` 0.23 have Unicode 16.0; Python's own unicodedata may have
another version.
"""
import textwrap

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

# Unicode's property White_Space, unchanged since version 6.3; unicodedata does not have it.
SPACES = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F,
          0x205F, 0x3000}
CLASSES = {"L": 1, "N": 2}  # by the first letter of the general category


def class_of(c):
    return 3 if c in SPACES else CLASSES.get(unicodedata.category(chr(c))[0], 0)


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

// Runs of characters of one class: the first character of each run, times 4, plus the class.
// clang-format off
static const uint32_t unicode_runs[{len(runs)}] = {{""")
    print(*("    " + line for line in lines), sep="\n")
    print("};\n// clang-format on\n\n#endif")


if __name__ == "__main__":
    main()
