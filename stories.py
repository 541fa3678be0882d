"""
Small children's stories from a grammar, as many as asked, without a network: text whose entropy is known exactly.

A rule is a name and its alternatives, one of which is drawn, each as likely as the others. In an alternative

    [food]       is an alternative of the rule `food`, drawn anew at each place
    {toy}        is drawn once in a story; from its second place on it is repeated
    {She|He}     is the first for a story about a girl, the second about a boy (one draw in a story)

No two derivations give the same text (`parse` finds them all, so that a test can tell). So the probability of a
story is the product of its draws, and -log2 of it is what the story costs at best: a model that sees nothing but the
stories comes near that cost and never below it. There are 10^47.1 different stories, 140.4 bits each on average.

Who and what a story is about is named again and again, for a model to show that it has learnt to copy. Each of them
has its first echo close by (named Lily. Lily ...), which is where a small model learns it soonest.
"""
import functools
import hashlib
import math
import re

VOCAB_SIZE = 1536  # enough for every word of the grammar to be one piece
SAMPLE = 1 << 22   # bytes of stories that are enough to train it on

GRAMMAR = r"""
story
    [opening] [likes] [companion] [pal] [outing] [scene] [plot] [closing]

opening
    Once upon a time, there was a [trait] {girl|boy} named {hero}.
    Once there was a [trait] {girl|boy} named {hero}.
    Long ago, there was a [trait] {girl|boy} named {hero}.
    In a [cozy] [village], there lived a [trait] {girl|boy} named {hero}.

likes
    {hero} loved to [hobby] and to eat [food].
    {hero} liked [food], but most of all {she|he} liked to [hobby].
    {hero} ate [food] every [day] and went out to [hobby].
    {hero} and {her|his} [parent] ate [food] and liked to [hobby].

companion
    {Her|His} best friend was a [furry] [animal] named {friend}.
    {She|He} had a [furry] [animal] named {friend}.
    Next door lived a [furry] [animal] named {friend}.
    {She|He} played with a [furry] [animal] named {friend}.

pal
    {friend} was [number] years old.
    {friend} loved [food].
    {friend} could [hobby].
    {friend} was very [trait].

outing
    One [weather] [day], {hero} and {friend} went to the {place}.
    One [weather] [day], {hero} took {friend} to the {place}.
    On a [weather] [day], {hero} and {friend} ran to the {place}.
    It was a [weather] [day], so {hero} and {friend} went to the {place}.

scene
    At the {place}, they saw [number] [furry] [birds] and a [trait] [worker].
    At the {place}, a [trait] [worker] sat [where] and ate [food].
    At the {place}, there were [number] [furry] [birds] [where].
    At the {place}, a [trait] [worker] gave them [food] and [number] [sweets].

plot
    [found_see] [looks] [found_say] [found_ask] [found_owner]
    [lost_miss] [looks] [lost_sad] [lost_search] [lost_find]
    [stuck_up] [looks] [stuck_try] [stuck_help] [stuck_down]
    [wish_see] [looks] [wish_price] [wish_work] [wish_buy]
    [share_one] [looks] [share_fight] [share_sad] [share_turns]
    [broke_how] [looks] [broke_hide] [broke_tell] [broke_fix]
    [gift_why] [gift_make] [gift_trouble] [gift_give]
    [baby_see] [looks] [baby_say] [baby_search] [baby_home]

looks
    The {toy} was {look} and very [nice].
    The {toy} was {look} and had [number] [dots] on it.
    The {toy} was {look} and bigger than a [animal].
    The {toy} was {look} and looked [old].

found_see
    [Then] {hero} looked [where] and saw a {toy}.
    [Then] {friend} found a {toy}.
    [Then] they looked [where] and found a {toy}.
    [Then] {friend} sat down [where], right next to a {toy}.
found_say
    "What a [nice] {toy}," [said] {hero} [softly].
    "Who lost this [nice] {toy}?" [said] {friend} [softly].
    "We must give the {toy} back," [said] {hero} [softly].
    {hero} wanted to keep the {toy}, but {friend} [said] [softly], "It is not ours."
found_ask
    [Then] they asked a [trait] [worker] about the {toy}.
    [Then] {hero} took the {toy} to a [trait] [worker] [where].
    [Then] {friend} showed the {toy} to a [trait] [worker].
    A [trait] [worker] had lost a {toy} too, but not a {look} one.
found_owner
    [Then] a [trait] child came, took the {toy} and felt [happy].
    [Then] {hero} gave the {toy} to a [trait] child, who felt [happy].
    [Then] a [trait] child got back the {toy} and gave them [food].
    It was the {toy} of a [trait] child, who [said] [softly], "Thank you, {friend}!"

lost_miss
    [Then] {hero} could not find {her|his} {toy}.
    [Then] {hero} [said] [softly], "Where is my {toy}?"
    [Then] {hero} lost {her|his} {toy}.
    [Then] {friend} looked [where], but could not see {hero}'s {toy}.
lost_sad
    {hero} sat down [where] and felt [sad].
    "My {toy} is gone," [said] {hero} [softly].
    "I will find the {toy}," [said] {friend} [softly].
    It was a [nice] {toy}, so {hero} felt [sad].
lost_search
    [Then] {friend} looked [where], but saw only [trash].
    [Then] they asked a [trait] [worker] about the {toy}.
    [Then] {hero} looked [where] and saw [trash], but no {toy}.
    [Then] they looked [where], but there was no {toy}.
lost_find
    [Then] {friend} found the {toy} [where], and {hero} felt [happy].
    [Then] {hero} saw the {look} {toy} [where] and felt [happy].
    [Then] a [trait] [worker] came with the {toy}, and {hero} felt [happy].
    [Then] a [furry] [animal] brought the {toy} to {hero}.

stuck_up
    [Then] onto a [roof] flew {hero}'s {toy}.
    [Then] up on a [roof] they saw {hero}'s {toy}.
    [Then] up on a [roof] {hero} saw {her|his} {toy}.
    [Then] onto a [roof] {friend} kicked {hero}'s {toy}.
stuck_try
    {hero} jumped [number] times, but the {toy} did not come down.
    {friend} threw [trash] at the {toy}, but it did not come down.
    "My {toy} is too high," [said] {hero} [softly].
    {hero} looked up at the {toy} and felt [sad].
stuck_help
    [Then] a [trait] [worker] came with a [tool].
    "We can use a [tool]," [said] {friend} [softly].
    [Then] {hero} found a [tool] [where].
    [Then] {friend} ran home and came back with a [tool].
stuck_down
    [Then] the {toy} came down, and {hero} felt [happy].
    [Then] the {look} {toy} came down and lay [where].
    [Then] {friend} got the {look} {toy}, and both felt [happy].
    "I have the {toy}," [said] {hero} [softly].

wish_see
    [Then] in a shop, {hero} saw a {toy}.
    A [trait] [worker] had a shop and sold a {toy}.
    {hero} [said] [softly], "I wish I had a {toy}."
    [Then] they met a [trait] child with a {toy}.
wish_price
    But the {toy} cost [number] coins.
    "How much is the {toy}?" [said] {hero} [softly]. It was [number] coins.
    {hero} had only [number] coins and felt [sad].
    There was no money for a {toy}, so {hero} felt [sad].
wish_work
    For [number] days, they [worked] for a [trait] [worker].
    {hero} [worked], and {friend} sold [food].
    Every [day], {hero} and {friend} [worked] for a [trait] [worker].
    {friend} helped and [worked] for [number] days.
wish_buy
    [Then] {hero} got the {look} {toy} and felt [happy].
    [Then] they went back and got the {toy}. {hero} felt [happy].
    [Then] a [trait] [worker] gave the {toy} to {hero}.
    "Now the {toy} is ours," [said] {hero} [softly].

share_one
    [Then] {hero} and {friend} both wanted a {toy}.
    They both wanted to [hobby], but had only one {toy}.
    {friend} sat [where] and played with a {toy}.
    [Then] {hero} looked [where] and found a {toy}.
share_fight
    {hero} pulled, and the {toy} fell down [where].
    "Give me the {toy}!" [said] {friend} [softly].
    {friend} hid the {toy} [where].
    "You never share the {toy}," [said] {hero} [softly].
share_sad
    [Then] {friend} went away and sat [where].
    [Then] {hero} felt [sad] and did not want to [hobby].
    A [trait] [worker] [said] [softly], "You are friends!"
    [Then] {friend} felt [sad] and gave {hero} [food].
share_turns
    [Then] they shared the {toy}, and both felt [happy].
    [Then] {hero} gave the {toy} to {friend} and felt [happy].
    "We can both play with the {toy}," [said] {hero} [softly].
    "The {toy} is for you," [said] {friend} [softly].

broke_how
    [Then] {hero} sat down on {friend}'s {toy}.
    [Then] {hero} broke {friend}'s {toy}.
    [Then] {hero} fell over a [animal] and broke {friend}'s {toy}.
    {hero} wanted to [hobby] and broke {friend}'s {toy}.
broke_hide
    {hero} felt [sad] and hid the {toy} [where].
    {hero} put the {toy} [where] and went away.
    {hero} put [trash] over the {toy} and felt [sad].
    "Where is my {toy}?" [said] {friend} [softly].
broke_tell
    [Then] {hero} [said] [softly], "I broke your {toy}, {friend}."
    [Then] {hero} told {friend} about the {toy}.
    "I am sorry about the {toy}," [said] {hero} [softly].
    [Then] {friend} found the {toy}, and {hero} felt [sad].
broke_fix
    [Then] they fixed the {toy} with [glue], and {friend} felt [happy].
    A [trait] [worker] fixed the {toy} with [glue].
    {friend} was not angry and fixed the {toy} with [glue].
    [Then] {hero} made a new {toy} for {friend} with [glue].

gift_why
    {hero} wanted to make {friend} a {look} {toy}.
    {friend} [said] [softly], "I wish I had a {look} {toy}."
    {friend} felt [sad], so {hero} wanted to make a {look} {toy}.
    It was {friend}'s birthday, so {hero} wanted to make a {look} {toy}.
gift_make
    {hero} sat [where] and made a {toy} with [glue].
    {hero} took [glue] and [trash] to make the {toy}.
    For [number] days, {hero} worked on the {toy} with [glue].
    A [trait] [worker] showed {hero} how to make a {toy} with [glue].
gift_trouble
    [Then] the {toy} fell down, and {hero} felt [sad].
    [Then] a [furry] [animal] sat on the {toy}, and {hero} felt [sad].
    "This is no good {toy}," [said] {hero} [softly].
    [Then] {hero} had no more [glue] and felt [sad].
gift_give
    But {friend} loved the {look} {toy} and felt [happy].
    [Then] {hero} gave the {toy} to {friend}, who felt [happy].
    "What a [nice] {toy}!" [said] {friend} [softly].
    [Then] {friend} got the {look} {toy} and put it [where].

baby_see
    [Then] they found a baby [animal] [where] with a {toy}.
    [Then] {hero} saw a baby [animal] that held a {toy}.
    [Then] {friend} heard a baby [animal]. It had a {toy}.
    A baby [animal] sat [where] and held a {toy}.
baby_say
    "I lost my mom," it [said] [softly] and held the {toy}.
    "We will help you and your {toy}," [said] {hero} [softly].
    {hero} gave it [food], and {friend} held the {toy}.
    "What a [nice] {toy} you have," [said] {friend} [softly].
baby_search
    [Then] they asked a [trait] [worker] about its mom.
    [Then] they looked for its mom [where].
    {friend} called for its mom [number] times.
    [Then] {hero} took it to a [trait] [worker] [where].
baby_home
    [Then] its mom came and gave the {toy} to {hero}.
    [Then] they found its mom [where], and all felt [happy].
    "Thank you, {hero} and {friend}," [said] its mom [softly].
    [Then] {friend} saw its mom [where], and {hero} felt [happy].

closing
    After that, {hero} and {friend} went to the {place} every [day].
    That [day], {hero} and {friend} ate [food] at the {place}.
    {hero} told {her|his} [parent] about the {place} and felt [happy].
    And {hero} knew that {friend} was a [trait] friend.
    "I like the {place}," [said] {friend} [softly], and they went home to [hobby].
    They left the {place}, ate [food] and felt [happy].
    Every [weather] [day], {hero} and {friend} went back to the {place}.
    {friend} and {hero} went home to [hobby] and felt [happy].

hero
    {[girl_name]|[boy_name]}

girl_name: Lily, Mia, Anna, Sue, Emma, Zoe, Ella, Lucy, Rose, Nina, Amy, Kate, Ruby, Molly, Clara, Daisy
boy_name: Tom, Ben, Max, Sam, Leo, Jack, Tim, Finn, Noah, Oscar, Peter, Paul, Luke, Henry, Theo, Adam
friend: Pip, Bruno, Coco, Momo, Biscuit, Pepper, Toby, Rusty, Socks, Ziggy, Nutmeg, Waffles, Dot, Button, Tiki,
    Bubbles
animal: dog, cat, rabbit, mouse, duck, pony, bear, squirrel, frog, goat, lamb, bird, turtle, pig, fox, hen
birds: dogs, cats, rabbits, ducks, ponies, frogs, goats, lambs, birds, pigs, bees, hens, cows, fish, bugs, swans
place: park, beach, forest, garden, river, farm, hill, market, meadow, lake, zoo, castle, harbor, mill, field,
    bridge
look: red, blue, green, yellow, purple, pink, silver, golden, white, black, brown, gray, shiny, round, wooden,
    striped
toy: ball, kite, doll, drum, boat, hat, book, bell, train, crown, robot, flute, lamp, scarf, basket, puppet
trait: little, brave, kind, clever, shy, merry, quiet, wise, gentle, cheerful, funny, lively, friendly, playful,
    polite, young
furry: small, big, fat, thin, fast, slow, lazy, silly, sleepy, spotted, noisy, hungry, fluffy, tiny, soft, wild
dots: dots, lines, stars, spots, holes, rings, hearts, words
cozy: tiny, quiet, sleepy, green, pretty, busy, cozy, sunny
village: village, town, valley, house, city, street, port, land
hobby: sing, dance, draw, read, swim, run, jump, play, hide, cook, paint, climb, write, count, dig, skate
food: apples, cookies, berries, soup, rice, corn, honey, cake, bread, cherries, plums, nuts, cheese, pears,
    grapes, pie
sweets: coins, stones, shells, flowers, candies, buttons, beans, stars
weather: sunny, windy, warm, cold, cloudy, bright, foggy, calm, fresh, mild, hot, chilly, rainy, lovely, dark, snowy
day: morning, afternoon, day, evening, Monday, Friday, Saturday, Sunday
parent: mom, dad, grandma, grandpa, aunt, uncle, sister, brother
worker: baker, farmer, painter, sailor, king, hunter, teacher, doctor, singer, cook, clown, driver, miller,
    builder, guard, dancer
where: under a bush, behind a rock, by the path, in the grass, on a bench, near a stone, under a leaf,
    behind a wall, by the fence, near a gate, on the stairs, in the sand, under a tree, in a box, by the water,
    in a corner
nice: beautiful, lovely, wonderful, funny, pretty, great, special, strange, fancy, cute, perfect, silly, sweet,
    rare, famous, plain
old: old, new, clean, dirty, heavy, light, soft, strong
softly: softly, kindly, slowly, gently, shyly, sweetly, proudly, calmly, warmly, bravely, quickly, politely,
    sadly, gladly, quietly, happily
said: said, called, answered, replied, sang, added, hummed, began
sad: sad, worried, lonely, bad, upset, scared, tired, sorry, gloomy, lost, small, hurt, angry, unhappy, cold, weak
happy: happy, glad, proud, lucky, cheerful, good, great, fine, merry, safe, warm, calm, thankful, brave, strong,
    free
worked: worked, cooked, painted, sang, danced, cleaned, washed, swept
trash: leaves, stones, feathers, shoes, cones, shells, sticks, cups
roof: roof, tree, wall, chimney, tower, gate, barn, rock
tool: ladder, stick, rope, broom, pole, rake, chair, net
number: two, three, four, five, six, seven, eight, nine
glue: glue, tape, string, wood, paper, thread, wire, paint
Then: Then, Soon, Suddenly, Later, Now, Next, After lunch, At noon
"""


def read_grammar(text):
    """{rule: (alternative, ...)}, an alternative being a tuple of symbols."""
    rules, name = {}, None
    text = text.replace(",\n    ", ", ")  # a list of words may go on in the next line
    for line in filter(str.strip, text.split("\n")):
        if line.startswith(" "):
            rules[name] += (symbols(line.strip()),)
        elif ":" in line:
            name, words = line.split(": ")
            rules[name] = tuple((word,) for word in words.split(", "))
        else:
            name = line
            rules[name] = ()
    return rules


def symbols(text):
    """
    An alternative as a tuple of symbols: a str as it stands, or (kind, rule) with kind "[" (drawn) or "{" (drawn
    once and kept), or ("|", (symbols for a girl, symbols for a boy)).
    """
    made = []
    for literal, drawn, kept, girl, boy in re.findall(r"([^][{}]+)|\[(\w+)\]|\{(\w+)\}|\{([^{}|]+)\|([^{}|]+)\}", text):
        made.append(literal or (drawn and ("[", drawn)) or (kept and ("{", kept)) or ("|", (symbols(girl), symbols(boy))))
    return tuple(made)


RULES = read_grammar(GRAMMAR)
BITS = {name: math.log2(len(alternatives)) for name, alternatives in RULES.items()}  # of one draw
CHARACTERS = "".join(sorted(set(GRAMMAR) - set("[]{}|_:\n")))  # all that a story can hold


def write(seed, number):
    """
    Story `number` of a seed -> (text, bits), a pure function of both; bits is -log2 of the story's probability.
    The draws are the digits of a hash, read as one long number (2^1024, so a draw is even to 1 part in 2^700).
    """
    digits = int.from_bytes(hashlib.shake_256(f"{seed} {number}".encode()).digest(128), "little")
    kept, bits = {}, 0.0

    def draw(rule):
        nonlocal digits, bits
        digits, choice = divmod(digits, len(RULES[rule]))
        bits += BITS[rule]
        return tell(RULES[rule][choice])

    def tell(sequence):
        nonlocal digits, bits
        said = []
        for symbol in sequence:
            if isinstance(symbol, str):
                said.append(symbol)
                continue
            kind, rule = symbol
            if kind == "[":
                said.append(draw(rule))
            elif kind == "{":
                if rule not in kept:
                    kept[rule] = draw(rule)
                said.append(kept[rule])
            else:
                if "boy" not in kept:
                    digits, kept["boy"] = divmod(digits, 2)
                    bits += 1
                said.append(tell(rule[kept["boy"]]))
        return "".join(said)

    return tell(RULES["story"][0]), bits


def parse(text):
    """The bits of every derivation of a text: one number for a story, none for a text that is not one."""
    return [bits for end, _, bits in derive((("[", "story"),), text, 0, {}) if end == len(text)]


def derive(sequence, text, at, kept):
    """
    Yields (end, kept, bits) for each way in which `sequence` derives text[at:end]. kept: what is known so far,
    {rule: its text} and {"boy": 0 or 1}.
    """
    if not sequence:
        yield at, kept, 0.0
        return
    for middle, known, bits in derive_one(sequence[0], text, at, kept):
        for end, all_known, more in derive(sequence[1:], text, middle, known):
            yield end, all_known, bits + more


def derive_one(symbol, text, at, kept):
    """What `derive` does, for one symbol."""
    if isinstance(symbol, str):
        if text.startswith(symbol, at):
            yield at + len(symbol), kept, 0.0
        return
    kind, rule = symbol
    if kind == "|":
        for boy in [kept["boy"]] if "boy" in kept else [0, 1]:
            for end, known, bits in derive(rule[boy], text, at, {**kept, "boy": boy}):
                yield end, known, bits + ("boy" not in kept)
    elif kind == "{" and rule in kept:
        yield from derive_one(kept[rule], text, at, kept)
    else:
        for alternative in RULES[rule]:
            for end, known, bits in derive(alternative, text, at, kept):
                yield end, {**known, rule: text[at:end]} if kind == "{" else known, bits + BITS[rule]


@functools.lru_cache(maxsize=None)
def measure(sequence, kept=frozenset()):
    """
    Everything `sequence` derives once the rules in `kept` are settled, as {kept after it: (probability, number of
    derivations, probability × mean bits)}.
    """
    ways = {kept: (1.0, 1, 0.0)}
    for symbol in sequence:
        then = {}
        for before, (p, n, b) in ways.items():
            for after, (q, m, c) in measure_one(symbol, before).items():
                old = then.get(after, (0.0, 0, 0.0))
                then[after] = (old[0] + p * q, old[1] + n * m, old[2] + p * c + q * b)
        ways = then
    return ways


def measure_one(symbol, kept):
    """What `measure` does, for one symbol."""
    if isinstance(symbol, str) or symbol[1] in kept:
        return {kept: (1.0, 1, 0.0)}
    kind, rule = symbol
    alternatives, name = (rule, "boy") if kind == "|" else (RULES[rule], rule)
    if kind == "|" and "boy" in kept:  # both sides have the same measure: lists of equal length
        return measure(rule[0], kept)
    share, then = 1 / len(alternatives), {}
    for alternative in alternatives:
        for after, (q, m, c) in measure(alternative, kept).items():
            after = after if kind == "[" else after | {name}
            old = then.get(after, (0.0, 0, 0.0))
            then[after] = (old[0] + share * q, old[1] + m, old[2] + share * (c - q * math.log2(share)))
    return then


def entropy():
    """Bits per story: the mean of -log2 of its probability, exactly."""
    return sum(bits for _, _, bits in measure((("[", "story"),)).values())


def count():
    """How many different stories there are, exactly."""
    return sum(n for _, n, _ in measure((("[", "story"),)).values())
