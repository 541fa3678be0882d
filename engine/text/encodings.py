"""
Detect the encoding of a text that is not UTF-8, only if its bytes identify it with certainty. A
refused file costs the user one command; a wrongly decoded one teaches the model wrong letters.
"""
import codecs
import re
import unicodedata
from collections import Counter

# The most frequent characters of each script. Their share of the letters is high in a text of that
# script and low in a text that was decoded with a wrong encoding.
CHINESE = ("的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得"
           "于着下自之年过发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分"
           "还进好小部其些主样理心她本前开但因只从想实這個們來為國說時會對於著過發後裡種經麼"
           "學現當沒動還進樣開從實")
KOREAN = ("이다는을의에가고하지은도로를한서사있어인기그나리들자아대시일과해수만정부보라장전"
          "원주여것게오제공구면했국동선상무성조모비었았습니요까")
KANA = "".join(map(chr, range(0x3041, 0x3097)))
CYRILLIC = "оеаинтсрвлкмдпуяы"
FREQUENT = {  # encoding: (frequent characters, their minimum share of the letters beyond ASCII)
    "GB18030": (CHINESE, 0.2), "BIG5-HKSCS": (CHINESE, 0.2), "CP932": (KANA, 0.2),
    "EUC-JP": (KANA, 0.2), "CP949": (KOREAN, 0.25), "CP1251": (CYRILLIC, 0.6),
    "KOI8-U": (CYRILLIC, 0.6)}
# A text whose letters do not all belong to one of these languages is in another language, such as
# Czech or Turkish, which has another encoding.
WESTERN = (  # (frequent letters beyond ASCII, all letters beyond ASCII)
    ("é", "àâçèéêëîïôùûüœæ"),     # French
    ("äöü", "äöüßé"),             # German
    ("áéíóñ", "áéíóúüñºª"),       # Spanish
    ("ç", "áàâãçéêíóôõúüªº"),     # Portuguese
    ("àèìòù", "àèéìíîòóùú"),      # Italian
    ("åä", "åäöé"),               # Swedish, Finnish
    ("øåæ", "æøåéô"),             # Danish
    ("ëïé", "áéèêëïíóôöúü"),      # Dutch
    ("àèò", "àçèéíïòóúü"),        # Catalan
    ("äõ", "äõöü"),               # Estonian
)
MARKS = "’‘“”„«»‹›–—…•°§£€©®™´¿¡\xa0\xad²³½¼¾×±µ·"  # used in all languages
# Marks where letters belong, and capitals inside words: signs that text from DOS, old Macs or
# ISO-8859-15 was decoded as CP1252. A dash between two words does not count.
STRANGE = re.compile("[a-zß-ÿ][À-ÞŒ]"
                     "|[^\\W\\d_](?:[‘„‹£•¡¿]|[“”»›…°\xa0²³½¼¾×±µ](?=[^\\W\\d_])|—\\s)"
                     "|(?:^|\\s)(?:[”›…]|[²³½¼¾×±µ°§©®™´·])(?=[^\\W\\d_])")
# UTF-32 first: the UTF-32-LE mark begins with the UTF-16-LE mark.
BOMS = [(codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"),
        (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16")]


def encoding(sample):
    """
    Return the name, in Python and iconv, of the encoding of a text that is not UTF-8, or "" if it
    is not certain.

    sample: bytes that begin with a whole character.
    """
    for mark, name in BOMS:
        if sample.startswith(mark):
            return name if is_plausible(decoded(sample, name)) else ""
    if b"\0" in sample:
        return by_zeros(sample)
    if damaged(sample):
        return ""
    scores = {name: share(decoded(sample, name), frequent) / minimum
              for name, (frequent, minimum) in FREQUENT.items()}
    *_, second, best = sorted(scores, key=scores.get)
    if scores[best] >= 1 and scores[best] > 2 * scores[second]:
        return best
    return "CP1252" if is_western(decoded(sample, "CP1252") or "") else ""


def decoded(sample, name):
    """Decode bytes whose last character may be cut off. Return None if they are invalid."""
    try:
        return codecs.getincrementaldecoder(name)().decode(sample)
    except UnicodeDecodeError:
        return None


def is_plausible(text):
    """Return whether all characters are assigned and all control characters are common in text."""
    def is_odd(c):
        is_control = c < " " and c not in "\t\n\r\f\v\x1b"
        return is_control or unicodedata.category(c) in ("Cn", "Co", "Cs")

    return bool(text) and not any(map(is_odd, set(text)))


def by_zeros(sample):
    """Name the encoding of bytes with zeros, UTF-16 or UTF-32 without a byte order mark, or ""."""
    for name in "UTF-32LE", "UTF-32BE":
        if is_plausible(decoded(sample, name)):
            return name
    # {name: number of ASCII characters, kana and East Asian punctuation}: frequent in texts of all
    # scripts, rare if the bytes are read in the wrong order.
    common = {}
    for name in "UTF-16LE", "UTF-16BE":
        text = decoded(sample, name)
        common[name] = 0
        if is_plausible(text):
            common[name] = sum(c < "\x7f" or "\u3000" <= c < "\u3100" for c in text)
    other, best = sorted(common, key=common.get)
    return best if common[best] > 4 * common[other] and common[best] * 50 > len(sample) else ""


def damaged(sample):
    """Return whether bytes are UTF-8 with errors: most bytes from 128 on form valid characters."""
    high = sum(map(sample.count, range(128, 256)))
    characters = Counter(sample.decode("utf-8", "ignore"))
    valid = sum(len(c.encode()) * n for c, n in characters.items() if c > "\x7f")
    return 2 * valid > high


def share(text, frequent):
    """
    Return the share of frequent characters among the letters beyond ASCII.

    Return 0 if these letters are few, if most are isolated between ASCII characters, or if they
    rule out the script.
    """
    letters = {c: n for c, n in Counter(text or "").items() if c > "\x7f" and c.isalpha()}
    total = sum(letters.values())
    in_runs = sum(map(len, re.findall("[^\\x00-\\x7f]{2,}", text or "")))
    if total < 10 or 2 * in_runs < total:
        return 0.0
    if frequent is CYRILLIC and not is_cyrillic(text, letters, total):
        return 0.0
    return sum(letters.get(c, 0) for c in set(frequent)) / total


def is_cyrillic(text, letters, total):
    """
    Return whether a text is Russian, Ukrainian or Bulgarian by its letters.

    Words must have no Latin letters and no capitals inside. The last letters of the alphabet must
    be frequent; they are rare in Hebrew, Greek and Thai decoded as Cyrillic. letters: {letter
    beyond ASCII: count}; total: the sum of the counts.
    """
    others = sum(n for c, n in letters.items() if c not in "ёЁіїєІЇЄ" and not "А" <= c <= "я")
    others += sum(c > "\x7f" and not c.isalpha() and c not in "«»“”„–—…№’\xa0" for c in text)
    mixed = len(re.findall("[a-zA-Z][Ѐ-ӿ]|[Ѐ-ӿ][a-zA-Z]", text))
    mixed += 10 * len(re.findall("[а-я][А-Я]", text))
    last = sum(letters.get(c, 0) for c in "ыьэюя")
    return 100 * others <= total and 50 * mixed <= total and 50 * last > total


def is_western(text):
    """
    Return whether CP1252 was the right encoding of a decoded text.

    Its letters beyond ASCII must be few and belong to one western language, or it must have only
    MARKS, and these where marks belong.
    """
    beyond = {c: n for c, n in Counter(text).items() if c > "\x7f"}
    letters = Counter()
    for c, n in beyond.items():
        if c not in MARKS:
            letters[c.lower()] += n
    all_beyond, total = sum(beyond.values()), sum(letters.values())
    if all_beyond < 3 or 4 * total > sum(map(str.isalpha, text)):
        return False
    if total and (total < 10 or len(letters) < 2 or max(letters.values()) > 0.95 * total):
        return False
    if re.search("[²³½¼¾×±©](?=[^\\W\\d_])", text):  # letters of ISO-8859-15, Estonian or Polish
        return False
    strange = len(STRANGE.findall(text))
    dashes = len(re.findall("[^\\W\\d_]—(?=[^\\W\\d_])", text))
    if 50 * strange + 5 * dashes > all_beyond:
        return False

    def count(some):
        return sum(letters[c] for c in some)

    return any(count(every) >= 0.999 * total and count(usual) >= 0.05 * total
               for usual, every in WESTERN)
