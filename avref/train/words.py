"""Word lists of `avref.train.prompts`: entries by slot name, which may hold slots of their own."""

import re


def split_entries(text: str) -> list[str]:
    """One entry per line or between two bars; a final backslash joins two lines, \\n is a line break."""
    text = text.replace(" \\\n", " ")
    return [entry.replace("\\n", "\n") for entry in re.split(r" \|\| |\n", text.strip())]


WORDS = {
    line.split(": ")[0]: line.split(": ", 1)[1].split("; ")
    for line in """
name: Ada; Bilal; Carmen; Dmitri; Elena; Farid; Greta; Hiro; Imani; Jonas; Kavya; Lars; Mina; Nadia; Oscar; Priya; \
Rosa; Samir; Tessa; Vera; Wendell; Ximena; Yusuf; Zoe; Anton; Beatriz; Chidi; Daphne; Emil; Fiona; Gustavo; Helga; \
Ivan; Jamila; Kofi; Leona; Marcus; Noor; Olga; Pablo; Rafael; Sven; Thandi; Viola; Walter; Yara
town: Lisbon; Oslo; Nairobi; Kyoto; Lima; Cork; Tallinn; Perth; Quito; Lyon; Austin; Gdansk; Hanoi; Turin; Accra; \
Bergen; Tampa; Leeds; Porto; Denver; Cairo; Basel; Dakar; Boston; Athens; Bogota
job: teacher; plumber; nurse; baker; pilot; farmer; lawyer; tailor; chemist; carpenter; editor; welder; surgeon; \
librarian; waiter; geologist; florist; mechanic; dentist; translator; architect; beekeeper
things: apples; stamps; marbles; notebooks; candles; bricks; tickets; buttons; oranges; postcards; tiles; batteries; \
cookies; pencils; shells; bottles; coins; eggs; roses; screws; books; cupcakes; balloons; stickers
box: boxes; crates; shelves; baskets; bags; trays; drawers; jars; carts
animal: otter; crow; tortoise; fox; octopus; goat; whale; moth; hedgehog; heron; wolf; cat; donkey; bee; lizard; \
badger; parrot; snail
color: red; green; silver; blue; amber; violet; grey; orange; white; black; pink; turquoise; brown; golden
food: lentil soup; pancakes; fried rice; tomato salad; roast chicken; flatbread; apple pie; omelette; curry; noodles; \
pizza dough; vegetable stew; oatmeal; bean tacos; baked potatoes; mushroom risotto; rice pudding; hummus
hobby: gardening; chess; running; painting; knitting; guitar; photography; swimming; baking; cycling; birdwatching; \
woodworking; yoga; juggling; calligraphy; climbing; pottery; singing; origami; skating
topic: photosynthesis; inflation; black holes; vaccines; plate tectonics; the water cycle; electric cars; democracy; \
the Silk Road; DNA; compound interest; rainbows; tides; antibiotics; the internet; recycling; volcanoes; the printing \
press; insulin; magnets; the Roman Empire; solar panels; earthquakes; glaciers; sleep; gravity; batteries; coral \
reefs; honey bees; the French Revolution; memory; lightning; the moon landing; fermentation; taxes
problem: my neighbour plays loud music; I keep forgetting appointments; my houseplant is losing leaves; I can't fall \
asleep; my phone battery drains quickly; I feel nervous before exams; my bread never rises; I argue with my brother; \
my desk is always messy; I spend too much on lunch; my bike makes a clicking noise; I am bored at work; my cat \
scratches the sofa; my back hurts after sitting; I procrastinate on big projects; my kitchen smells of onions; my \
internet is slow; I miss my old friends
task: clean a cast iron pan; change a bicycle tyre; write a CV; plan a birthday party; learn the piano; start a \
vegetable garden; save money each month; pack for a week abroad; train a puppy; prepare for a job interview; remove a \
wine stain; sharpen a knife; organise a bookshelf; read more books; give a speech; choose a laptop; paint a bedroom; \
run a first 5k; brew better coffee; meet people in a new city; fix a dripping tap; write a thank-you note; stay \
focused while studying; back up my photos
subject: a lighthouse keeper; a broken clock; the last train home; a lost mitten; a talking mirror; two rival bakers; \
a town without music; an old map; a shy robot; a midnight market; a forgotten song; a stolen violin; a river in \
winter; a paper boat; a desert well; a stubborn queen; a haunted elevator; a letter that arrives late; a child who \
draws doors; an island of cats; a clumsy thief; a garden on the moon; the first snow; a secret recipe; a retired \
astronaut; a whispering forest; a glass bridge; a sleepy dragon
genre: ghost story; detective story; fairy tale; science fiction story; love story; western; fable; comedy sketch; \
adventure story; myth; thriller; bedtime story; diary entry; monologue; folk tale; satire
form: haiku; sonnet; limerick; free verse poem; ballad; rhyming couplet; prose poem; lullaby; ode; song lyric; \
acrostic
mood: melancholy; playful; eerie; hopeful; tense; dreamy; sarcastic; tender; angry; quiet; absurd; nostalgic; proud
setting: an abandoned fairground; a submarine; a mountain village; a crowded tram; a space station; a rainy harbour; \
a royal kitchen; a library at night; a desert motel; a treehouse; a frozen lake; a city under the sea; a school \
attic; a flower shop
lang: Python; Python; Python; JavaScript; Java; C; C++; Go; Rust; TypeScript; Ruby; Kotlin
verb: reverses; sorts; removes duplicates from; finds the largest value in; counts the items of; rotates; shuffles; \
splits in half; flattens; merges two of; finds the median of; checks the symmetry of; prints every second element of; \
groups equal values in
data: a list of integers; a string; a linked list; a dictionary; a binary tree; a matrix; a queue; a set of words; a \
list of tuples; an array of floats; a stack; a nested list; a sorted array; a list of dates
func: total; clean; lookup; scale; merge; average; parse; collect; update; trim; encode; filter_rows; is_valid; \
count_up
var: items; values; data; rows; numbers; words; scores; records; nodes; prices; names; entries
concept: a hash table; recursion; a pointer; big-O notation; a decorator; a closure; an interface; garbage \
collection; a mutex; an SQL join; version control; unit testing; a REST API; a regular expression; a generator; \
inheritance; a binary search; caching
app: to-do list; tip calculator; tic-tac-toe game; password generator; word counter; bank account; parking garage; \
unit converter; quiz game; stopwatch; address book; shopping cart; dice roller; hangman game; temperature logger; \
library catalogue
table: orders; customers; products; employees; flights; songs; invoices; students; visits; books
day: Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday
tone: polite; friendly; short; formal; apologetic; cheerful; firm
person: my landlord; my boss; a colleague; my aunt; a hotel; the school office; a customer; my team; an old friend
audience: a child; a beginner; a busy manager; a high school student; my grandmother; a curious friend
closing: Be brief; Keep it simple; Use plain words; Answer in one paragraph; Answer in under 80 words; Be as precise \
as you can; Take your time; No introduction, please; Start right away; Use short sentences; Write for {audience}; \
Mention {topic} if it fits; Imagine that {name} from {town} reads it
opening: I am a {job} from {town}; Hello; This is for {audience}; I have a test on {day}; {name} asked me this; \
Please help me; My teacher, {name}, wants this by {day}; We are a small team in {town}; It is late and I am tired; \
Quick question; I like {hobby} and {food}; We talked about {topic} yesterday; You are a patient {job}
length: in two sentences; in one paragraph; in a few words; with an example; as a short list; in about 100 words; \
step by step
limit: without using built-in helpers; in linear time; recursively; using only one loop; and handles empty input; \
without extra memory; with type hints; with a docstring; in at most ten lines; and raises an error on bad input; with \
comments on each step
""".strip().splitlines()
}

WORDS["sentence"] = split_entries(r"""
{name}, a {job} with {small} years of practice, advised the council of {town} against buying {things} from abroad.
They say that {hobby} is harder than {hobby2}, yet {name} disagrees. || Invoice {code} was paid by {name} on {date}.
A {color} {animal} slept under the table while {name} made {food}. || {name} and {name2} meet every {day} for {hobby}.
{town} is {mid} kilometres from {town2}, but the road is closed. || Because of {topic}, the lecture was moved to {day}.
Nobody in {town} remembers who painted the {animal} {color}. || The {things} arrived late, so {name} left without them.
The train to {town} leaves at {clock} from platform {small}. || The {color} house near the station belongs to {name}.
Last winter the {job} counted {big} {things} in the cellar. || {name} moved to {town} in {year} and became a {job}.
On {date} the shop sold {mid} {things} for {price} dollars. || Our {job} prefers {food} to {food2}.
Please bring {small} {things} and a {color} bag on {day}. || In {year} a {animal} won the race.
{name} can be reached at {email}.
""")

WORDS["snippet"] = split_entries(r"""
class Counter:\n    def __init__(self):\n        self.n = {small}\n    def {func}(self):\n        self.n += {small2}
function {func}({var}) {\n  let best = 0;\n  for (const x of {var}) if (x > best) best = x;\n  return best;\n}
def {func}({var}, seen=[]):\n    for x in {var}:\n        if x not in seen: seen.append(x)\n    return seen
def {func}({var}):\n    result = 0\n    for x in {var}:\n        result =+ x\n    return result
{var} = dict()\nfor w in text.split():\n    {var}[w] = {var}.get(w, 0) + {small}\nprint({var})
int {func}(int n) {\n    if (n <= 1) return 1;\n    return n * {func}(n - {small});\n}
def {func}({var}, n={small}):\n    return [x * n for x in {var} if x % {small2} == 0]
def {func}({var}):\n    for i in range(len({var}) + 1):\n        print({var}[i])
for (let i = 0; i <= {var}.length; i++) {\n  console.log({var}[i].name);\n}
def {func}({var}):\n    {var}.sort()\n    return {var}[len({var}) // 2]
def {func}(a, b):\n    while b:\n        a, b = b, a % b\n    return a
SELECT town, COUNT(*) FROM {table} WHERE price > {mid} GROUP BY town;
def {func}(s):\n    s = s.lower()\n    return s == s[::-1]
""")
