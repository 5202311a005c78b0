"""Owns the arithmetic word problems (English and Chinese) that nano-deepseek learns from.

Each template draws its numbers and names from the given generator and answers in worked steps.
"""

from random import Random

NAMES = (
    "Tom Anna Maria Ben Li Yuki Omar Sara Ivan Nina Paul Lena Raj Emma Noah Olga Hugo Mei Leo Zoe"
).split()
ITEMS = {
    "apples": "苹果",
    "pencils": "铅笔",
    "books": "书",
    "marbles": "弹珠",
    "stickers": "贴纸",
    "coins": "硬币",
    "cookies": "饼干",
    "cards": "卡片",
    "eggs": "鸡蛋",
    "flowers": "花",
    "stamps": "邮票",
    "shells": "贝壳",
}
QuestionAnswer = tuple[str, str]


def _people_and_item(rng: Random) -> tuple[str, str, str]:
    first, second = rng.sample(NAMES, 2)
    return first, second, rng.choice(list(ITEMS))


def gain(rng: Random) -> QuestionAnswer:
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    n, m, item = _people_and_item(rng)
    question = rng.choice(
        (
            f"{n} has {a} {item}. {m} gives {n} {b} more {item}. "
            f"How many {item} does {n} have now?",
            f"{n} had {a} {item} and then found {b} more. How many {item} does {n} have?",
            f"If {n} owns {a} {item} and buys another {b}, how many {item} is that in total?",
        )
    )
    return question, f"{n} starts with {a} {item}.\nThen {n} gets {b} more.\n" + _sum_line(a, b)


def lose(rng: Random) -> QuestionAnswer:
    b, rest = rng.randint(2, 40), rng.randint(1, 40)
    a = b + rest
    n, m, item = _people_and_item(rng)
    question = rng.choice(
        (
            f"{n} has {a} {item} and gives {b} of them to {m}. How many {item} are left?",
            f"{n} had {a} {item} but lost {b}. How many {item} does {n} still have?",
            f"There were {a} {item} on the table. {n} took {b}. How many {item} remain?",
        )
    )
    return question, (
        f"At first there are {a} {item}.\nTake away {b}.\n{a} - {b} = {rest}.\n#### {rest}"
    )


def boxes(rng: Random) -> QuestionAnswer:
    a, c = rng.randint(2, 30), rng.randint(2, 9)
    n, _, item = _people_and_item(rng)
    question = rng.choice(
        (
            f"There are {c} boxes. Each box holds {a} {item}. How many {item} are there in total?",
            f"{n} fills {c} bags with {a} {item} each. How many {item} does {n} need?",
        )
    )
    return question, f"There are {c} groups of {a} {item}.\n{c} * {a} = {c * a}.\n#### {c * a}"


def share(rng: Random) -> QuestionAnswer:
    a, c = rng.randint(2, 20), rng.randint(2, 9)
    n, _, item = _people_and_item(rng)
    question = rng.choice(
        (
            f"{n} shares {a * c} {item} equally among {c} friends. "
            f"How many {item} does each friend get?",
            f"{a * c} {item} are packed into {c} equal boxes. How many {item} are in one box?",
        )
    )
    return question, (
        f"The {a * c} {item} are split into {c} equal parts.\n{a * c} / {c} = {a}.\n#### {a}"
    )


def packs_and_extra(rng: Random) -> QuestionAnswer:
    a, b, c = rng.randint(2, 20), rng.randint(2, 40), rng.randint(2, 9)
    n, _, item = _people_and_item(rng)
    return (
        f"{n} buys {c} packs of {item} with {a} in each pack, and then finds {b} more. "
        f"How many {item} does {n} have?",
        f"First, the packs hold {c} * {a} = {c * a} {item}.\n"
        f"Then {n} finds {b} more.\n" + _sum_line(c * a, b),
    )


def buy_and_give(rng: Random) -> QuestionAnswer:
    a, b = rng.randint(5, 40), rng.randint(5, 40)
    c = rng.randint(2, a + b - 1)
    n, m, item = _people_and_item(rng)
    return (
        f"{n} has {a} {item}, buys {b} more and gives {c} to {m}. How many {item} are left?",
        f"First, {n} has {a} + {b} = {a + b} {item}.\nThen {n} gives {c} to {m}.\n"
        f"{a + b} - {c} = {a + b - c}.\n#### {a + b - c}",
    )


def change(rng: Random) -> QuestionAnswer:
    price, count = rng.randint(2, 12), rng.randint(2, 8)
    paid = rng.choice([p for p in (20, 50, 100) if p >= price * count])
    n, _, item = _people_and_item(rng)
    total = price * count
    return (
        f"{n} buys {count} {item} for {price} dollars each and pays with {paid} dollars. "
        f"How much change does {n} get?",
        f"First, the {item} cost {count} * {price} = {total} dollars.\n"
        f"Then the change is {paid} - {total} = {paid - total} dollars.\n#### {paid - total}",
    )


def compare(rng: Random) -> QuestionAnswer:
    b, more = rng.randint(3, 40), rng.randint(2, 30)
    n, m, item = _people_and_item(rng)
    return (
        f"{n} has {b} {item}. {m} has {more} more than {n}. How many {item} do they have together?",
        f"First, {m} has {b} + {more} = {b + more} {item}.\nTogether they have "
        f"{b} + {b + more} = {2 * b + more} {item}.\n#### {2 * b + more}",
    )


def speed(rng: Random) -> QuestionAnswer:
    v, h = rng.randint(3, 30), rng.randint(2, 9)
    n = rng.choice(NAMES)
    way = rng.choice(("walks", "rides", "drives", "runs"))
    return (
        f"{n} {way} {v} km every hour. How far does {n} go in {h} hours?",
        f"In one hour {n} goes {v} km.\nIn {h} hours: {h} * {v} = {h * v} km.\n#### {h * v}",
    )


def age(rng: Random) -> QuestionAnswer:
    a, d, later = rng.randint(4, 40), rng.randint(2, 20), rng.randint(2, 15)
    n, m = rng.sample(NAMES, 2)
    return (
        f"{n} is {a} years old. {m} is {d} years older. How old will {m} be in {later} years?",
        f"First, {m} is {a} + {d} = {a + d} years old now.\n"
        f"In {later} years {m} will be {a + d} + {later} = {a + d + later}.\n#### {a + d + later}",
    )


def rectangle(rng: Random) -> QuestionAnswer:
    a, b = rng.randint(2, 20), rng.randint(2, 9)
    if rng.random() < 0.5:
        return (
            f"A rectangle is {a} cm long and {b} cm wide. What is its area?",
            f"The area is length times width.\n{a} * {b} = {a * b} square cm.\n#### {a * b}",
        )
    return (
        f"A rectangle is {a} cm long and {b} cm wide. What is its perimeter?",
        f"First, add the sides: {a} + {b} = {a + b}.\n"
        f"Then double it: 2 * {a + b} = {2 * (a + b)} cm.\n#### {2 * (a + b)}",
    )


def bare_sum(rng: Random) -> QuestionAnswer:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    question = rng.choice((f"What is {a} + {b}?", f"Compute {a} + {b}.", f"{a} + {b} = ?"))
    return question, _sum_line(a, b)


def bare_difference(rng: Random) -> QuestionAnswer:
    b, rest = rng.randint(2, 60), rng.randint(0, 60)
    a = b + rest
    question = rng.choice((f"What is {a} - {b}?", f"Compute {a} - {b}.", f"{a} - {b} = ?"))
    return question, f"{a} - {b} = {rest}.\n#### {rest}"


def bare_product(rng: Random) -> QuestionAnswer:
    a, b = rng.randint(2, 30), rng.randint(2, 9)
    question = rng.choice((f"What is {a} * {b}?", f"Compute {a} times {b}.", f"{a} * {b} = ?"))
    return question, f"{a} * {b} = {a * b}.\n#### {a * b}"


def gain_zh(rng: Random) -> QuestionAnswer:
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    n, m, item = _people_and_item(rng)
    word = ITEMS[item]
    question = rng.choice(
        (
            f"{n}有{a}个{word}，{m}又给了{n} {b}个。{n}现在一共有多少个{word}？",
            f"{n}原来有{a}个{word}，后来买了{b}个。现在有几个{word}？",
        )
    )
    return question, (
        f"{n}原来有{a}个{word}。\n又得到{b}个，所以一共有 {a} + {b} = {a + b} 个{word}。\n"
        f"#### {a + b}"
    )


def lose_zh(rng: Random) -> QuestionAnswer:
    b, rest = rng.randint(2, 40), rng.randint(1, 40)
    a = b + rest
    n, m, item = _people_and_item(rng)
    word = ITEMS[item]
    return (
        f"{n}有{a}个{word}，送给{m} {b}个。还剩多少个{word}？",
        f"{n}原来有{a}个{word}。\n送出{b}个，还剩 {a} - {b} = {rest} 个{word}。\n#### {rest}",
    )


def boxes_zh(rng: Random) -> QuestionAnswer:
    a, c = rng.randint(2, 30), rng.randint(2, 9)
    word = ITEMS[rng.choice(list(ITEMS))]
    return (
        f"每个盒子里有{a}个{word}，{c}个盒子里一共有多少个{word}？",
        f"一共有{c}个盒子，每个盒子{a}个{word}。\n{c} * {a} = {c * a}。\n#### {c * a}",
    )


def two_step_zh(rng: Random) -> QuestionAnswer:
    a, b, c = rng.randint(2, 20), rng.randint(2, 40), rng.randint(2, 9)
    n, _, item = _people_and_item(rng)
    word = ITEMS[item]
    return (
        f"{n}买了{c}包{word}，每包{a}个，后来又捡到{b}个。{n}有多少个{word}？",
        f"第一步，{c}包一共有 {c} * {a} = {c * a} 个{word}。\n"
        f"第二步，加上捡到的{b}个：{c * a} + {b} = {c * a + b}。\n#### {c * a + b}",
    )


def _sum_line(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}.\n#### {a + b}"


TEMPLATES = (
    gain,
    lose,
    boxes,
    share,
    packs_and_extra,
    buy_and_give,
    change,
    compare,
    speed,
    age,
    rectangle,
    bare_sum,
    bare_difference,
    bare_product,
    gain_zh,
    lose_zh,
    boxes_zh,
    two_step_zh,
)


def sample(rng: Random) -> QuestionAnswer:
    """Draw one (question, worked answer); the answer's last line is `#### <number>`."""
    return rng.choice(TEMPLATES)(rng)
