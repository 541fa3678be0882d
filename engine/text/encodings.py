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
            "CP949": (KOREAN, 0.25), "CP1251": (CYRILLIC, 0.6), "KOI8-U": (CYRILLIC, 0.6)}
# Of French, German, Spanish, Portuguese, Italian, Swedish, Danish, Dutch, Catalan, Finnish and Estonian: letters beyond ASCII that
# are frequent, and all of them. No language has all letters; what has others is Czech, Turkish or another in its own encoding.
WESTERN = (("é", "àâçèéêëîïôùûüœæ"), ("äöü", "äöüßé"), ("áéíóñ", "áéíóúüñºª"), ("ç", "áàâãçéêíóôõúüªº"), ("àèìòù", "àèéìíîòóùú"),
           ("åä", "åäöé"), ("øåæ", "æøåéô"), ("ëïé", "áéèêëïíóôöúü"), ("àèò", "àçèéíïòóúü"), ("äõ", "äõöü"))
MARKS = "’‘“”„«»‹›–—…•°§£€©®™´¿¡\xa0\xad²³½¼¾×±µ·"  # found in all languages
# Marks where letters should be: as the letters of DOS, old Macs and ISO-8859-15 would be read. A dash between words is none.
STRANGE = re.compile("[a-zß-ÿ][À-ÞŒ]|[^\\W\\d_](?:[‘„‹£•¡¿]|[“”»›…°\xa0²³½¼¾×±µ](?=[^\\W\\d_])|—\\s)"
                     "|(?:^|\\s)(?:[”›…]|[²³½¼¾×±µ°§©®™´·])(?=[^\\W\\d_])")
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
    together = sum(map(len, re.findall("[^\\x00-\\x7f]{2,}", text or "")))
    if total < 10 or 2 * together < total or frequent is CYRILLIC and not is_cyrillic(text, letters, total):
        return 0.0
    return sum(letters.get(c, 0) for c in set(frequent)) / total


def is_cyrillic(text, letters, total):
    """
    Whether letters are those of Russian, Ukrainian or Bulgarian, in words of their own without capitals inside, and the last
    ones of the alphabet are among them, which Hebrew, Greek or Thai read as Cyrillic would not use so.
    """
    others = sum(n for c, n in letters.items() if c not in "ёЁіїєІЇЄ" and not "А" <= c <= "я")
    others += sum(c > "\x7f" and not c.isalpha() and c not in "«»“”„–—…№’\xa0" for c in text)
    mixed = len(re.findall("[a-zA-Z][Ѐ-ӿ]|[Ѐ-ӿ][a-zA-Z]", text)) + 10 * len(re.findall("[а-я][А-Я]", text))
    return 100 * others <= total and 50 * mixed <= total and 50 * sum(letters.get(c, 0) for c in "ыьэюя") > total


def is_western(text):
    """Whether the letters beyond ASCII are few, and all those of one western language, or are none but marks in their places."""
    odd = {c: n for c, n in Counter(text or "").items() if c > "\x7f"}
    letters = Counter()
    for c, n in odd.items():
        letters[c.lower()] += n * (c not in MARKS)
    letters, total, strange = +letters, sum(letters.values()), len(STRANGE.findall(text or ""))
    dashes = len(re.findall("[^\\W\\d_]—(?=[^\\W\\d_])", text or ""))
    known = any(sum(letters[c] for c in all_) >= 0.999 * total and sum(letters[c] for c in usual) >= 0.05 * total
                for usual, all_ in WESTERN)
    enough = not total or total >= 10 and len(letters) >= 2 and max(letters.values()) <= 0.95 * total
    if re.search("[²³½¼¾×±©](?=[^\\W\\d_])", text or ""):  # letters of ISO-8859-15, Estonian or Polish
        return False
    return (sum(odd.values()) >= 3 and known and enough and 50 * strange + 5 * dashes <= sum(odd.values())
            and 4 * total <= sum(map(str.isalpha, text)))
