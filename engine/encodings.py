"""The encoding of a text that is not UTF-8, where its bytes tell it for certain: no text is better than one read wrongly."""
import codecs
import re
import unicodedata
from collections import Counter

# The most frequent characters of a script: so great a part of any text at least, and few of one decoded as what it is not.
CHINESE = ("的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过"
           "发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本"
           "前开但因只从想实這個們來為國說時會對於著過發後裡種經麼學現當沒動還進樣開從實")
KOREAN = ("이다는을의에가고하지은도로를한서사있어인기그나리들자아대시일과해수만정부보라장전원주여것게오제공구"
          "면했국동선상무성조모비었았습니요까")
KANA = "".join(map(chr, range(0x3041, 0x3097)))
CYRILLIC = "оеаинтсрвлкмдпуяы"
FREQUENT = {"GB18030": (CHINESE, 0.2), "BIG5-HKSCS": (CHINESE, 0.2), "CP932": (KANA, 0.2), "EUC-JP": (KANA, 0.2),
            "CP949": (KOREAN, 0.25), "CP1251": (CYRILLIC, 0.6), "KOI8-R": (CYRILLIC, 0.6)}
# The letters of French, German, Spanish, Portuguese, Italian, Swedish, Danish, Icelandic, Dutch, Catalan, Estonian that ASCII
# lacks. No language has letters of all: such a text is Czech, Polish or another in an encoding that puts other letters there.
WESTERN = ("àâçèéêëîïôùûüœæ", "äöüßé", "áéíóúüñ¿¡", "áàâãçéêíóôõúüªº", "àèéìíîòóùú", "åäöé", "æøåéô", "áðéíóúýþæö",
           "áéèêëïíóôöúü", "àçèéíïòóúü·", "äõöü")
MARKS = "’‘“”„«»‹›–—…•°§£€©®™´\xa0\xad"  # found with all of them
BOMS = [(codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
        (codecs.BOM_UTF16_BE, "UTF-16")]


def encoding(sample):
    """
    The name of the encoding, for Python and iconv, of a text that is not UTF-8, where these of its bytes tell it for certain,
    else "". They begin with a character.
    """
    for mark, name in BOMS:
        if sample.startswith(mark):
            return name if is_plausible(decoded(sample, name)) else ""
    if b"\0" in sample:
        return by_zeros(sample)
    if damaged(sample):
        return ""
    shares = {name: share(decoded(sample, name), frequent) / least for name, (frequent, least) in FREQUENT.items()}
    *_, second, best = sorted(shares, key=shares.get)
    if shares[best] >= 1 and shares[best] > 2 * shares[second]:
        return best
    return "CP1252" if is_western(decoded(sample, "CP1252")) else ""


def decoded(sample, name):
    """Bytes, the last character of which may be cut off, as text; None where they are none in that encoding."""
    try:
        return codecs.getincrementaldecoder(name)().decode(sample)
    except UnicodeDecodeError:
        return None


def is_plausible(text):
    """Whether all characters are assigned, and none is a control character that no text has."""
    return bool(text) and not any(unicodedata.category(c) in ("Cn", "Co", "Cs") or c < " " and c not in "\t\n\r\f\v\x1b"
                                  for c in set(text))


def by_zeros(sample):
    """The encoding of bytes with zeros among them: UTF-16 or UTF-32 without a byte order mark, or ""."""
    for name in "UTF-32LE", "UTF-32BE":
        if is_plausible(decoded(sample, name)):
            return name
    usual = {}  # characters that all scripts have; the other order would make rare ones of them
    for name in "UTF-16LE", "UTF-16BE":
        text = decoded(sample, name)
        usual[name] = sum(c < "\x7f" or "\u3000" <= c < "\u3100" for c in text) if is_plausible(text) else 0
    other, best = sorted(usual, key=usual.get)
    return best if usual[best] > 4 * usual[other] and usual[best] * 50 > len(sample) else ""


def damaged(sample):
    """Whether bytes are text in UTF-8 but for some: most of those beyond ASCII make characters."""
    high = sum(map(sample.count, map(bytes, zip(range(128, 256)))))
    good = sum(len(c.encode()) * n for c, n in Counter(sample.decode("utf-8", "ignore")).items() if c > "\x7f")
    return 2 * good > high


def share(text, frequent):
    """How great a part of the letters beyond ASCII the frequent ones are; 0 where there are few letters, or odd ones."""
    letters = {c: n for c, n in Counter(text or "").items() if c > "\x7f" and c.isalpha()}
    total = sum(letters.values())
    if total < 10 or frequent is CYRILLIC and not is_cyrillic(text, letters, total):
        return 0.0
    return sum(letters.get(c, 0) for c in set(frequent)) / total


def is_cyrillic(text, letters, total):
    """
    Whether letters are those of Russian, Ukrainian or Bulgarian, in words of their own, and the last ones of the alphabet are
    among them, which Hebrew or Greek read as Cyrillic would not use.
    """
    others = sum(n for c, n in letters.items() if c not in "ёЁіїєґІЇЄҐ" and not "А" <= c <= "я")
    mixed = len(re.findall("[a-zA-Z][Ѐ-ӿ]|[Ѐ-ӿ][a-zA-Z]", text))
    return 100 * others <= total and 20 * mixed <= total and 50 * sum(letters.get(c, 0) for c in "ыьэюя") > total


def is_western(text):
    """Whether the letters beyond ASCII are few, and all those of one western language, in places where they may be."""
    odd = {c: n for c, n in Counter(text or "").items() if c > "\x7f"}
    letters = {c: n for c, n in odd.items() if c not in MARKS}
    total = sum(letters.values())
    known = max(sum(n for c, n in letters.items() if c.lower() in language) for language in WESTERN)
    strange = len(re.findall("[a-zà-ÿ][À-ÞŒ]|[^\\W\\d_][„“«»°](?=[a-zà-ÿ])", text or ""))  # as old Macs' letters would be
    return (sum(odd.values()) >= 3 and known >= 0.98 * total and 50 * strange <= sum(odd.values())
            and 4 * total <= sum(map(str.isalpha, text)))
