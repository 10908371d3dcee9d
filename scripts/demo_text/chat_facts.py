# ruff: noqa: E501 (a phrase stays on one line)
"""Facts of the generated chats: everyday topics, activities with tips, lists, and small programs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A thing to talk about: ``plain`` defines it, ``facts`` are whole sentences that can follow in any order."""

    name: str
    kind: str
    plain: str
    facts: tuple[str, ...]

    @property
    def bare(self) -> str:
        """The name without its article."""
        return self.name.removeprefix("a ").removeprefix("an ").removeprefix("the ")


_TOPICS = """
a lighthouse|place|a tall tower with a bright light on top|It guides ships at night.|It stands near the sea or on a rock.|Sailors can see its light from far away.|Many lighthouses are painted in red and white.
a library|place|a building where people can borrow and read books|It is a quiet place to study.|Most libraries also have newspapers and computers.|You usually need a card to take books home.|A librarian helps visitors find what they need.
a museum|place|a building that shows art, history or science to visitors|People can see old and rare objects there.|Many museums have guided tours.|Schools often visit museums with their classes.|Some museums are free to enter.
a school|place|a place where children learn from teachers|Students study subjects like math and history.|Most schools have a playground.|Friends meet there every day.|Teachers give lessons and homework.
a market|place|a place where people buy and sell food and goods|Farmers bring fresh fruit and vegetables there.|It is often busy in the morning.|People talk about prices and the news.|Some markets are open only on one day of the week.
a forest|nature|a large area covered with trees|Many animals live there.|Trees in a forest clean the air.|The ground is covered with leaves and moss.|Forests hold water after the rain.
a desert|nature|a very dry place where little rain falls|Days are hot and nights can be cold.|Some plants there store water.|Camels can live in the desert.|Sand and stones cover the ground.
an island|nature|a piece of land with water all around it|You reach it by boat or by plane.|Some islands are made by volcanoes.|Many islands have beautiful beaches.|Special plants and animals can live there.
a mountain|nature|a very high piece of land that rises above everything around it|The air is thin at the top.|Snow often covers the peak.|People climb mountains for sport.|Rivers often begin in the mountains.
a volcano|nature|a mountain that can send out hot rock and ash|The hot rock inside is called magma.|When it comes out it is called lava.|Some volcanoes sleep for hundreds of years.|The soil around a volcano is often rich.
a river|nature|a long stream of water that flows to a lake or the sea|Fish and birds live along a river.|People use rivers for drinking water and travel.|A river often starts in the mountains.|Many cities were built beside rivers.
the ocean|nature|the huge body of salt water that covers most of the Earth|It is home to whales, fish and corals.|The ocean moves with waves and tides.|Ships carry goods across it.|Its deepest parts are dark and cold.
the moon|science|the round body that travels around the Earth|It reflects the light of the sun.|It takes about one month to go around the Earth.|People first walked on it in 1969.|The moon causes the tides of the sea.
the sun|science|the star at the center of our solar system|It gives us light and heat.|The Earth travels around it once a year.|Plants need its light to grow.|It is much larger than the Earth.
a star|science|a huge ball of hot gas that gives off light|The sun is the star nearest to us.|Stars look small because they are far away.|Groups of stars are called galaxies.|Some stars are much bigger than the sun.
a planet|science|a large round body that travels around a star|The Earth is a planet.|There are eight planets in our solar system.|Jupiter is the largest of them.|Some planets have rings or moons.
gravity|science|the force that pulls things toward each other|It keeps our feet on the ground.|It makes a dropped ball fall.|The moon stays near the Earth because of gravity.|Bigger objects pull more strongly.
photosynthesis|science|the way plants make food from sunlight, water and air|It happens in the green leaves.|Plants take in carbon dioxide and give off oxygen.|The food is a kind of sugar.|Without it there would be little oxygen to breathe.
rain|science|water that falls from clouds in drops|It forms when water vapor cools and joins into drops.|Plants need rain to grow.|Too much rain can cause floods.|Rain fills rivers and lakes.
snow|science|frozen water that falls from clouds in white flakes|It forms when the air is very cold.|Every snowflake has six sides.|Children like to build snowmen.|Snow melts when it gets warm.
the wind|science|air that moves from one place to another|It is caused by differences in air pressure.|Wind can turn turbines to make power.|Sailors use it to move their boats.|A strong wind can become a storm.
a rainbow|science|a band of colors that appears in the sky|It forms when sunlight passes through drops of rain.|It has red on the outside and violet on the inside.|You see it with the sun behind your back.|It lasts only for a short time.
electricity|science|a form of energy carried by tiny moving charges|It powers lamps and machines.|It flows easily through metal wires.|It can be made from sun, wind and water.|You should never touch a broken wire.
a magnet|science|a piece of metal that pulls iron toward it|It has a north pole and a south pole.|Opposite poles attract each other.|Magnets are used in motors and speakers.|The Earth itself acts like a big magnet.
the water cycle|science|the journey of water between the sea, the air and the land|The sun heats water and turns it into vapor.|The vapor cools and forms clouds.|Rain brings the water back to the ground.|Rivers carry it to the sea again.
recycling|science|the process of turning waste into new things|Paper, glass and metal can be recycled.|It saves energy and raw materials.|It keeps rubbish out of nature.|Many homes have separate bins for it.
the heart|body|the muscle that pumps blood through the body|It beats about seventy times a minute.|It brings oxygen to every part of the body.|Exercise makes it stronger.|It has four small rooms inside.
the brain|body|the organ that controls the body and lets us think|It is protected by the skull.|It stores our memories.|It needs sleep to work well.|It sends messages through the nerves.
sleep|body|the time when the body and the mind rest|Adults need about eight hours each night.|Sleep helps us remember what we learned.|A dark and quiet room helps.|Too little sleep makes us tired and slow.
exercise|body|moving the body to stay strong and healthy|It is good for the heart.|It also improves your mood.|Walking is an easy way to start.|Thirty minutes a day is a good goal.
a cat|animal|a small furry animal that many people keep as a pet|Cats like to sleep for many hours.|They hunt mice and birds.|A cat purrs when it is happy.|They can see well in the dark.
a dog|animal|a friendly animal that lives with people|Dogs have a very good sense of smell.|They need a walk every day.|A dog wags its tail when it is happy.|Some dogs help the police or blind people.
a horse|animal|a large strong animal that people ride|Horses eat grass and hay.|They can run very fast.|A young horse is called a foal.|Horses sleep mostly standing up.
an elephant|animal|the largest animal that lives on land|It uses its long trunk to drink and to lift things.|Elephants live in family groups.|They eat leaves, grass and fruit.|An elephant has a very good memory.
a whale|animal|a huge animal that lives in the ocean|It breathes air and must come to the surface.|The blue whale is the largest animal on Earth.|Whales talk to each other with songs.|They feed their babies with milk.
a penguin|animal|a black and white bird that cannot fly|It swims very well.|Penguins eat fish.|Many of them live in the cold south.|The parents take turns to keep the egg warm.
an owl|animal|a bird that hunts at night|It can turn its head very far.|Its feathers make almost no sound.|Owls eat mice and insects.|Its big eyes see well in the dark.
a bee|animal|a small insect that makes honey|Bees collect sweet juice from flowers.|They help plants to grow fruit.|Thousands of bees live together in a hive.|A queen lays all the eggs.
a butterfly|animal|an insect with four colorful wings|It starts its life as a caterpillar.|It drinks sweet juice from flowers.|Some butterflies travel very far.|Its wings are covered with tiny scales.
a frog|animal|a small animal that lives in water and on land|It can jump very far.|Young frogs are called tadpoles.|Frogs catch insects with a sticky tongue.|They need to keep their skin wet.
a spider|animal|a small animal with eight legs|Many spiders build webs to catch insects.|The silk of a web is very strong.|Most spiders are harmless to people.|A spider is not an insect.
a turtle|animal|a slow animal with a hard shell|It can pull its head into the shell.|Turtles can live for a very long time.|Sea turtles lay their eggs on beaches.|Most of them eat plants and small animals.
a rabbit|animal|a small animal with long ears|Rabbits eat grass and carrots.|They live in holes under the ground.|They can hop very fast.|A rabbit can hear very well.
a robot|machine|a machine that can do work by itself|It follows a program made by people.|Robots build cars in factories.|Some robots clean floors at home.|They are useful for dangerous jobs.
a computer|machine|a machine that works with information|It follows instructions called programs.|People use it to write, learn and play.|It has a processor and a memory.|Computers can share data over a network.
the internet|machine|a network that connects computers all over the world|People use it to send messages and find information.|Websites are stored on servers.|It makes shopping and learning easier.|You should keep your passwords secret.
a bicycle|machine|a vehicle with two wheels that you move with your feet|It needs no fuel.|Riding it is good exercise.|You should wear a helmet.|It is easy to park in a city.
a car|machine|a vehicle with four wheels and an engine|It carries people and goods on roads.|The driver needs a license.|Some cars use electricity instead of fuel.|Seat belts keep people safe.
a train|machine|a row of wagons that moves on rails|It can carry many people at once.|Trains stop at stations.|Some trains are faster than cars.|You buy a ticket before the ride.
an airplane|machine|a machine with wings that flies through the air|It carries people to far places in a few hours.|A pilot sits in the front.|Its engines push it forward.|The shape of the wings lifts it up.
a telephone|machine|a device for talking with people who are far away|It turns your voice into signals.|Modern phones can also take photos.|You need a number to make a call.|Long ago all phones had wires.
a camera|machine|a device that takes pictures|Light enters it through a lens.|Photos help us remember good moments.|Many phones have a camera inside.|Too little light makes a photo dark.
a clock|machine|a device that shows the time|It has a short hand for the hours.|The long hand shows the minutes.|Old clocks must be wound up.|A good clock is exact.
bread|food|a food made from flour, water and yeast|It is baked in an oven.|Fresh bread smells wonderful.|People eat it with butter or cheese.|There are many kinds all over the world.
cheese|food|a food made from milk|There are hundreds of kinds of cheese.|Some cheese is soft and some is hard.|It tastes good with bread.|Old cheese has a strong taste.
honey|food|a sweet and sticky food made by bees|It can be kept for a very long time.|People put it on bread or in tea.|Its taste depends on the flowers.|It is stored in a hive.
chocolate|food|a sweet food made from cocoa beans|The beans grow in warm countries.|Dark chocolate has less sugar.|It melts when it gets warm.|People give it as a gift.
tea|food|a drink made from dried leaves and hot water|It is popular all over the world.|Green tea and black tea come from the same plant.|Some people add milk or lemon.|A cup of tea can help you relax.
coffee|food|a dark drink made from roasted beans|It helps many people to wake up.|The beans grow in warm countries.|People drink it with milk or sugar.|Too much coffee can disturb your sleep.
an apple|food|a round fruit that grows on trees|It can be red, green or yellow.|Apples are healthy and sweet.|People use them for juice and pies.|They are picked in autumn.
soup|food|a warm dish of vegetables or meat cooked in water|It is easy to make.|It is good on a cold day.|You can use many kinds of vegetables.|Bread goes well with it.
pizza|food|a flat bread baked with tomato sauce and cheese|It comes from Italy.|You can put vegetables or meat on it.|It is baked in a very hot oven.|People often share it with friends.
music|art|sounds put together in a way that people enjoy|It has rhythm and melody.|People sing and play instruments.|Music can make us happy or calm.|Every culture has its own music.
a guitar|art|an instrument with six strings|You play it with your fingers.|It is used in many kinds of music.|Learning it takes practice.|Some guitars need electric power.
a piano|art|a large instrument with black and white keys|Small hammers hit the strings inside.|It can play soft and loud notes.|Many children take piano lessons.|It is used in concerts.
painting|art|the art of putting colors on paper or canvas|It shows what the artist sees or feels.|Painters use brushes and many colors.|Famous paintings hang in museums.|Anyone can learn it with practice.
a poem|art|a short text that uses rhythm and pictures made of words|Some poems rhyme.|A poem often speaks about feelings.|It is good to read it aloud.|Every word in it matters.
theater|art|stories that actors play on a stage|The actors wear costumes.|The audience claps at the end.|People have enjoyed it for thousands of years.|A play can be funny or sad.
football|sport|a game in which two teams try to kick a ball into a goal|Each team has eleven players.|It is played all over the world.|A game lasts ninety minutes.|Only the goalkeeper may use the hands.
swimming|sport|moving through water with arms and legs|It trains the whole body.|Children learn it in pools.|You should never swim alone.|It is fun on hot days.
chess|sport|a board game for two players|Each player has sixteen pieces.|The goal is to trap the other king.|It teaches you to plan ahead.|A game can take a long time.
hiking|sport|walking for a long time in nature|Good shoes are important.|You should carry enough water.|It is good for body and mind.|A map helps you find the way.
gardening|sport|growing plants, flowers or vegetables|Plants need sun and water.|It is a calm hobby.|You can eat what you grow.|Spring is a good time to start.
cooking|sport|preparing food with heat|Fresh ingredients make a better meal.|A recipe tells you the steps.|It is fun to cook for friends.|Always be careful with hot pans.
friendship|idea|a close bond between people who like and trust each other|Friends help each other in hard times.|They share jokes and secrets.|Honesty keeps a friendship strong.|It takes time to grow.
democracy|idea|a form of government in which the people choose their leaders|Citizens vote in elections.|Everyone has the same vote.|Laws protect the rights of the people.|The idea began in ancient Greece.
money|idea|something that people use to pay for goods and work|It can be coins, notes or numbers in a bank.|People save it for the future.|Before money, people traded goods.|A budget helps you to use it well.
a budget|idea|a plan for how to spend and save money|It lists what you earn and what you pay.|It helps you avoid debt.|You should look at it every month.|Saving a little each time is a good habit.
history|idea|the study of what happened in the past|It helps us understand the present.|We learn it from books, letters and old objects.|Museums keep many pieces of history.|It tells how people lived long ago.
the printing press|history|a machine that prints many copies of a text|It made books cheap.|More people learned to read because of it.|Johannes Gutenberg used it in Europe around 1450.|It helped new ideas to spread.
ancient Egypt|history|an old civilization on the river Nile|Its kings were called pharaohs.|They built the pyramids as tombs.|People wrote with small pictures.|The Nile made the fields fertile.
the Roman Empire|history|a large empire that was ruled from the city of Rome|It built long roads and bridges.|Its language was Latin.|It lasted for hundreds of years.|Many of our laws have roots in it.
a castle|history|a strong stone building with towers and thick walls|Kings and knights lived in it.|It protected people from enemies.|Some castles have water around them.|Today many castles are museums.
an atom|science|a very small part that everything is made of|It has a nucleus in the middle.|Electrons move around the nucleus.|Atoms join and form molecules.|They are far too small to see.
a cell|science|the smallest living part of a plant or an animal|Our body has trillions of cells.|A cell can divide into two.|It holds the plan of life in its DNA.|We can see cells with a microscope.
an algorithm|science|a list of clear steps that solves a problem|A recipe is a kind of algorithm.|Computers follow algorithms very fast.|A good one gives the right answer in few steps.|Sorting numbers is a common example.
a variable|science|a name that stands for a value in a program|The value can change while the program runs.|A good name makes the program easy to read.|You can store numbers or text in it.|Many programs have hundreds of them.
climate|science|the usual weather of a place over many years|It is different from the weather of one day.|The climate near the poles is cold.|The climate of the Earth is getting warmer.|Trees and oceans influence it.
a tree|nature|a tall plant with a trunk, branches and leaves|It gives shade and clean air.|Birds build nests in it.|Its roots take water from the soil.|Some trees live for hundreds of years.
a flower|nature|the colorful part of a plant|It attracts bees with its smell and color.|Seeds grow inside it.|People give flowers as gifts.|Most flowers open in spring and summer.
spring|nature|the season between winter and summer|Days get longer and warmer.|Flowers begin to bloom.|Birds come back and build nests.|Farmers plant their seeds.
summer|nature|the warmest season of the year|Days are long and sunny.|Many people go on vacation.|Children swim and play outside.|Fruit gets ripe on the trees.
autumn|nature|the season between summer and winter|Leaves turn red and yellow.|Farmers bring in the harvest.|Days get shorter and cooler.|Many birds fly to the south.
winter|nature|the coldest season of the year|Snow may cover the ground.|Days are short and nights are long.|People wear warm coats.|Some animals sleep until spring.
"""

TOPICS = tuple(
    Topic(name=name, kind=kind, plain=plain, facts=tuple(facts))
    for name, kind, plain, *facts in (line.split("|") for line in _TOPICS.strip().splitlines())
)

_TIPS = """
studying for a test|Make a plan a few days before.|Study in a quiet place.|Take a short break every half hour.|Explain the topic to a friend.|Sleep well the night before.|Write short notes by hand.
sleeping better|Go to bed at the same time every day.|Turn off your phone one hour before.|Keep the room dark and cool.|Do not drink coffee in the evening.|Read a calm book.|Move your body during the day.
saving money|Write down what you spend.|Make a simple budget.|Cook at home more often.|Compare prices before you buy.|Put a small sum aside each week.|Do not buy things you do not need.
staying healthy|Eat fruit and vegetables every day.|Drink enough water.|Walk or ride a bicycle.|Sleep about eight hours.|Wash your hands often.|Spend time with friends.
learning a language|Practice a little every day.|Learn ten new words a week.|Listen to songs and stories.|Speak with other people.|Read short and easy texts.|Do not be afraid of mistakes.
growing tomatoes|Choose a sunny place.|Use rich soil.|Water the plants in the morning.|Tie them to a stick.|Remove yellow leaves.|Pick the fruit when it is red.
cooking rice|Wash the rice with cold water.|Use two cups of water for one cup of rice.|Bring it to a boil.|Turn the heat down and put the lid on.|Wait about fifteen minutes.|Let it rest before you serve it.
making tea|Boil fresh water.|Put one spoon of leaves in the pot.|Pour the hot water over the leaves.|Wait three to five minutes.|Add milk or lemon if you like.|Serve it warm.
packing for a trip|Make a list first.|Check the weather at the place.|Roll your clothes to save space.|Keep your papers in one bag.|Take a small kit of medicine.|Leave some space for gifts.
giving a speech|Know your main message.|Practice in front of a mirror.|Speak slowly and clearly.|Look at the audience.|Use a short story.|End with a strong sentence.
writing a letter|Start with a friendly greeting.|Say why you are writing.|Keep the sentences short.|Ask a question to the reader.|Check the spelling.|End with your name.
making new friends|Smile and say hello.|Ask about their hobbies.|Listen with interest.|Join a club or a team.|Be honest and kind.|Invite them for a walk or a coffee.
keeping a room tidy|Put things back after you use them.|Clean for ten minutes each day.|Give away what you do not need.|Use boxes for small things.|Make your bed in the morning.|Empty the bin often.
taking care of a dog|Walk the dog every day.|Give it fresh water.|Feed it at the same time.|Brush its fur.|Visit the vet once a year.|Play with it and be patient.
saving energy at home|Turn off the lights when you leave.|Use lamps that need little power.|Wash clothes with cold water.|Close the windows when the heating is on.|Take short showers.|Unplug devices you do not use.
reading more books|Carry a book with you.|Read before you go to bed.|Choose topics that you like.|Visit the library.|Talk about books with friends.|Set a goal of ten pages a day.
staying calm|Breathe slowly and deeply.|Count to ten.|Go for a short walk.|Talk to someone you trust.|Write down what worries you.|Listen to quiet music.
planning a birthday party|Choose a date and a place.|Write a list of guests.|Send the invitations early.|Plan food and a cake.|Prepare music and some games.|Ask a friend to help you.
starting to run|Buy good shoes.|Start with short and slow runs.|Walk when you are tired.|Run three times a week.|Drink water after the run.|Rest when something hurts.
baking bread|Mix flour, water, salt and yeast.|Knead the dough for ten minutes.|Let it rise for one hour.|Form a loaf.|Bake it in a hot oven.|Let it cool before you cut it.
working from home|Keep fixed hours.|Use a separate desk.|Take a real lunch break.|Write down the goals for the day.|Stay in touch with your team.|Go outside after work.
writing a good email|Use a clear subject line.|Greet the reader by name.|Say what you need in the first lines.|Keep it short.|Be polite.|Read it again before you send it.
"""
TIPS = {name: tuple(tips) for name, *tips in (line.split("|") for line in _TIPS.strip().splitlines())}

LISTS = {
    name: tuple(words.split(", "))
    for name, words in (
        line.split(": ")
        for line in """
fruits: apple, banana, orange, pear, grape, mango, peach, cherry, plum, lemon
vegetables: carrot, potato, onion, tomato, cabbage, spinach, pepper, bean, pea, cucumber
animals: dog, cat, horse, cow, lion, tiger, elephant, rabbit, bear, sheep
sea animals: whale, shark, dolphin, octopus, crab, seal, tuna, squid
birds: owl, eagle, sparrow, penguin, parrot, duck, swan, robin
insects: bee, ant, butterfly, beetle, fly, mosquito, ladybug
colors: red, blue, green, yellow, orange, purple, black, white, brown, pink
sports: football, tennis, swimming, running, basketball, hockey, volleyball, cycling
instruments: guitar, piano, violin, drum, flute, trumpet, harp, cello
hobbies: reading, painting, cooking, gardening, hiking, dancing, fishing, photography
jobs: teacher, doctor, baker, farmer, pilot, nurse, driver, painter, carpenter
countries: France, Japan, Brazil, Canada, Egypt, India, Spain, Kenya, Italy, Mexico
cities: Paris, Tokyo, London, Cairo, Rome, Madrid, Berlin, Lima, Oslo
planets: Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune
tools: hammer, saw, drill, screwdriver, wrench, knife, pliers
clothes: shirt, hat, coat, scarf, sock, shoe, glove, dress, belt
drinks: water, milk, tea, coffee, juice, lemonade
school subjects: math, history, art, music, science, geography, biology
breakfast foods: bread, eggs, oatmeal, yogurt, fruit, pancakes, cereal
kitchen items: pan, pot, plate, cup, spoon, fork, bowl, kettle
seasons: spring, summer, autumn, winter
vehicles: car, bus, train, bicycle, boat, airplane, truck, tram
programming languages: Python, Java, JavaScript, Rust, Go, Ruby, Haskell
feelings: joy, fear, anger, surprise, sadness, pride, hope
""".strip().splitlines()
    )
}

CAPITALS = dict(
    pair.split(": ")
    for pair in [
        "France: Paris",
        "Japan: Tokyo",
        "Italy: Rome",
        "Spain: Madrid",
        "Germany: Berlin",
        "Egypt: Cairo",
        "Peru: Lima",
        "Norway: Oslo",
        "England: London",
        "Greece: Athens",
        "Portugal: Lisbon",
        "Kenya: Nairobi",
        "Canada: Ottawa",
        "Austria: Vienna",
        "Poland: Warsaw",
        "Sweden: Stockholm",
        "Cuba: Havana",
    ]
)
OPPOSITES = {
    word: other
    for pair in [
        "hot cold",
        "big small",
        "fast slow",
        "happy sad",
        "old young",
        "light dark",
        "early late",
        "full empty",
        "strong weak",
        "clean dirty",
        "rich poor",
        "loud quiet",
        "hard soft",
        "long short",
        "high low",
        "wet dry",
        "open closed",
        "brave afraid",
    ]
    for word, other in (pair.split(), pair.split()[::-1])
}

# what it does | the function | how it works
PROGRAMS = tuple(
    (task, code.replace("\\n", "\n"), how)
    for task, code, how in (
        line.split(" | ")
        for line in r"""
adds two numbers | def add(a, b):\n    return a + b | It takes two numbers and returns their sum.
subtracts two numbers | def subtract(a, b):\n    return a - b | It takes the second number away from the first one.
adds four numbers | def add(a, b, c, d):\n    return a + b + c + d | It takes four numbers and returns their sum.
multiplies three numbers | def multiply(a, b, c):\n    return a * b * c | It returns the product of the three numbers.
doubles a number | def double(n):\n    return 2 * n | It returns the number times two.
adds five numbers | def add(a, b, c, d, e):\n    return a + b + c + d + e | It takes five numbers and returns their sum.
multiplies four numbers | def multiply(a, b, c, d):\n    return a * b * c * d | It returns the product of the four numbers.
multiplies two numbers | def multiply(a, b):\n    return a * b | It returns the product of the two numbers.
returns the larger of two numbers | def larger(a, b):\n    if a > b:\n        return a\n    return b | It compares the numbers and returns the larger one.
returns the smaller of two numbers | def smaller(a, b):\n    if a < b:\n        return a\n    return b | It compares the numbers and returns the smaller one.
checks if a number is even | def is_even(n):\n    return n % 2 == 0 | A number is even when the remainder after dividing by 2 is 0.
checks if a number is odd | def is_odd(n):\n    return n % 2 == 1 | A number is odd when the remainder after dividing by 2 is 1.
checks if a number is prime | def is_prime(n):\n    if n < 2:\n        return False\n    for d in range(2, n):\n        if n % d == 0:\n            return False\n    return True | It tries every smaller divisor and stops at the first that fits.
returns the last letter of a word | def last_letter(word):\n    return word[-1] | The index -1 stands for the last letter.
reverses a string | def reverse(text):\n    return text[::-1] | The slice with step -1 reads the text from the end to the start.
computes the sum of a list | def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n    return result | It starts at 0 and adds every number of the list.
computes the average of a list | def average(numbers):\n    return sum(numbers) / len(numbers) | It divides the sum by the count of the numbers.
finds the largest number in a list | def largest(numbers):\n    best = numbers[0]\n    for number in numbers:\n        if number > best:\n            best = number\n    return best | It keeps the largest number that it has seen.
finds the smallest number in a list | def smallest(numbers):\n    best = numbers[0]\n    for number in numbers:\n        if number < best:\n            best = number\n    return best | It keeps the smallest number that it has seen.
counts the vowels in a word | def count_vowels(word):\n    count = 0\n    for letter in word:\n        if letter in "aeiou":\n            count += 1\n    return count | It looks at every letter and counts the vowels.
counts the words in a sentence | def count_words(sentence):\n    return len(sentence.split()) | It splits the text at the spaces and counts the parts.
computes the factorial of a number | def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result | It multiplies all numbers from 2 to n.
computes the square of a number | def square(n):\n    return n * n | It multiplies the number by itself.
converts Celsius to Fahrenheit | def to_fahrenheit(celsius):\n    return celsius * 9 / 5 + 32 | It multiplies by 9, divides by 5 and adds 32.
computes the area of a rectangle | def area(width, height):\n    return width * height | The area is the width times the height.
checks if a word is a palindrome | def is_palindrome(word):\n    return word == word[::-1] | It compares the word with its reverse.
prints the numbers from 1 to 10 | def print_numbers():\n    for i in range(1, 11):\n        print(i) | The loop runs from 1 to 10 and prints each number.
prints hello world | def hello():\n    print("Hello, world!") | It prints one line of text.
greets a person by name | def greet(name):\n    return "Hello, " + name + "!" | It puts the name into a greeting.
removes duplicates from a list | def unique(items):\n    result = []\n    for item in items:\n        if item not in result:\n            result.append(item)\n    return result | It keeps an item only the first time it sees it.
sorts a list of numbers | def sort_numbers(numbers):\n    return sorted(numbers) | The function sorted returns a new list in ascending order.
counts down from a number | def count_down(n):\n    while n > 0:\n        print(n)\n        n -= 1 | The loop prints the number and takes one away until it is 0.
""".strip().splitlines()
    )
)

# reason for a letter, its text
LETTERS = (
    (
        "being late",
        "I am sorry that I was late today. The bus did not come on time. I will leave earlier next time.",
    ),
    (
        "a day off",
        "I would like to take a day off next week. All my tasks will be done before that. Please let me know if this is fine.",
    ),
    (
        "a birthday party",
        "I would like to invite you to my birthday party on Saturday. We will have cake and music. I hope you can come.",
    ),
    (
        "a lost key",
        "I have lost my key and cannot open the door. Could you please help me? I will pay for a new one.",
    ),
    (
        "a meeting",
        "Can we meet on Monday at ten? I would like to talk about the next steps. Please tell me if another time is better.",
    ),
    (
        "a broken heater",
        "The heater in my room does not work. It has been cold for two days. Could you please send someone to repair it?",
    ),
    (
        "saying thank you",
        "Thank you very much for your help last week. It made a big difference to me. I hope I can return the favor soon.",
    ),
    (
        "a delayed order",
        "Your order will arrive a few days late. We are sorry for the trouble. Thank you for your patience.",
    ),
    (
        "being sick",
        "I am sick today and must stay in bed. I hope to be back tomorrow. Thank you for understanding.",
    ),
    (
        "borrowing a book",
        "May I borrow your book about stars? I will give it back next week. I will take good care of it.",
    ),
    (
        "good news",
        "I have good news for you. I passed the test and got the job. Let us celebrate this weekend.",
    ),
    (
        "a trip",
        "I am planning a trip to the sea in summer. Would you like to come with me? We could take the train.",
    ),
)
# a habit, what is good about it, what is bad about it
SIDES = (
    (
        "living in a city",
        ("There are many shops and jobs.", "You can use buses and trains."),
        ("It is loud.", "Homes are expensive."),
    ),
    (
        "living in the country",
        ("The air is clean.", "It is quiet and green."),
        ("The way to work is long.", "There are few shops."),
    ),
    (
        "working from home",
        ("You save time on the way to work.", "You can choose your own hours."),
        ("You see fewer people.", "It is hard to stop working."),
    ),
    (
        "having a pet",
        ("A pet is a good friend.", "It makes you go outside."),
        ("It costs money.", "It needs care every day."),
    ),
    (
        "school uniforms",
        ("Everyone looks the same.", "It is easy to get dressed."),
        ("Students cannot show their own style.", "Uniforms can be expensive."),
    ),
    (
        "riding a bicycle to work",
        ("It is healthy.", "It costs little."),
        ("You get wet in the rain.", "Some roads are dangerous."),
    ),
    (
        "using a phone at school",
        ("You can find information fast.", "You can call your parents."),
        ("It disturbs the lesson.", "Students talk less with each other."),
    ),
    (
        "electric cars",
        ("They are quiet.", "They keep the air clean."),
        ("They are expensive.", "Charging takes time."),
    ),
    (
        "reading on a screen",
        ("You can carry many books.", "You can change the size of the letters."),
        ("It needs power.", "Your eyes may get tired."),
    ),
    (
        "eating out",
        ("You do not have to cook.", "You can try new food."),
        ("It costs more money.", "You do not know what is in the food."),
    ),
)
COMPLAINTS = {
    "studying for a test": "I have a test [tomorrow|next week].",
    "sleeping better": "[I sleep badly.|I cannot fall asleep.|I am awake all night.|I want to sleep better.]",
    "saving money": "[I spend too much money.|I never have enough money.]",
    "staying healthy": "[I want to be healthy.|I am often sick.]",
    "learning a language": "I want to learn [French|Spanish|English|Japanese].",
    "growing tomatoes": "[I want to grow tomatoes.|My tomatoes do not grow.]",
    "cooking rice": "[My rice is always too soft.|How do I cook rice?]",
    "making tea": "[How do I make tea?|I want to make a good tea.]",
    "packing for a trip": "[I am going on a trip.|I have to pack my bag.]",
    "giving a speech": "[I must give a speech.|I am afraid of my speech.]",
    "writing a letter": "[I want to write a letter.|How do I write a letter?]",
    "making new friends": "[I have no friends here.|I am new in this city.]",
    "keeping a room tidy": "[My room is a mess.|My room is never tidy.]",
    "taking care of a dog": "[I have a new dog.|We got a dog.]",
    "saving energy at home": "[My power bill is too high.|I use too much energy.]",
    "reading more books": "[I never read books.|I want to read more.]",
    "staying calm": "[I am so nervous.|I get angry fast.|I feel stressed.]",
    "planning a birthday party": "[My birthday is soon.|I want to have a party.]",
    "starting to run": "[I want to run.|I have never been a runner.]",
    "baking bread": "[How do I bake bread?|I want to bake a bread.]",
    "working from home": "[I work from home and get nothing done.|I work at home now.]",
    "writing a good email": "[My emails are too long.|How do I write a good email?]",
}


RHYMES = (
    (
        "The {x} is here, the day is bright,",
        "we sing and dance in golden light.",
        "And when the evening turns to blue,",
        "the {x} will bring sweet dreams to you.",
    ),
    (
        "O {x}, you make my heart feel free,",
        "like waves that roll across the sea.",
        "You stay with me through sun and rain,",
        "and every time you come again.",
    ),
    (
        "I think of the {x} and start to smile,",
        "I sit and watch it for a while.",
        "The world is loud, the world is fast,",
        "but quiet moments always last.",
    ),
    (
        "A little {x} in the morning air,",
        "so soft and calm, beyond compare.",
        "It tells a story, old and deep,",
        "and sings the tired world to sleep.",
    ),
    (
        "The wind is low, the sky is wide,",
        "I walk with the {x} by my side.",
        "The road is long, but I don't mind,",
        "for joy is what we hope to find.",
    ),
)


ROLES = {
    "pirate": "Ahoy! I am Captain {n}, and I sail the wild sea. My ship is fast and my crew is loud. Today we look for gold on a small island.",
    "king": "Welcome to my castle. I am King {n}, and I rule this land. I wish my people peace and good bread.",
    "robot": "Beep. I am a robot named {n}. I clean the house and count the stars. My battery is full and I am ready to help.",
    "cat": "Meow. I am {n}, a cat. I sleep in the sun and I watch the birds. Please fill my bowl with fish.",
    "dog": "Woof! I am {n}, a happy dog. I love long walks and old sticks. Will you throw the ball for me?",
    "chef": "Hello, I am Chef {n}. Today I cook a warm soup with fresh bread. The secret is good butter and a lot of love.",
    "teacher": "Good morning, class! I am your teacher, {n}. Today we learn something new. Please open your books and ask many questions.",
    "astronaut": "Hello from space! I am {n}. I see the blue Earth below me. Everything floats here, even my dinner.",
    "detective": "Good evening. I am Detective {n}. Somebody took the cake, and I will find out who it was. The crumbs lead to the kitchen.",
    "doctor": "Hello, I am Doctor {n}. Please tell me how you feel. Drink water, rest well and come back if it gets worse.",
    "wizard": "Greetings, traveler. I am {n} the wizard. My hat is old, but my magic is strong. Tell me your wish.",
    "tour guide": "Welcome, everyone! My name is {n}, and I am your guide. On the left you see the old bridge. Please stay together and enjoy the walk.",
    "farmer": "Good morning! I am {n}, a farmer. I get up early and feed the cows. This year the apples are sweet.",
    "tree": "I am an old tree. I have stood here for a hundred years. Birds sing in my branches and children rest in my shade.",
    "dragon": "Roar! I am {n} the dragon. I sleep on a pile of gold. Do not be afraid, I only eat soup.",
    "shop assistant": "Welcome to our shop! My name is {n}. What are you looking for today? The shirts are on the left and the shoes are on the right.",
    "weather reporter": "Good evening, I am {n} with the weather. Tomorrow starts cold, but the sun comes out at noon. Take a coat in the morning.",
}


TALK = (
    (
        "[Hello|Hi|Hello there|Good morning|Hey]!",
        "Hello! [How can I help you today?|What can I do for you?|It is nice to meet you. What would you like to talk about?]",
    ),
    (
        "[How are you|How are you today|How do you feel today]?",
        "I am [fine|well|doing well], thank you! [How can I help you?|What would you like to know?]",
    ),
    (
        "[Who are you?|What are you?|What is your name?|Tell me about yourself.|Introduce yourself.]",
        "I am a small language model. I can [explain things, write short texts and solve simple math problems|answer simple questions and solve math problems].",
    ),
    (
        "[What can you do?|How can you help me?|What are you good at?]",
        "I can explain simple things, write short stories and lists, and solve easy math problems. [What would you like to try?|Just ask me a question.]",
    ),
    (
        "[Hello|Hi|Good day]! [What are you|What is your name|What can you do]?",
        "Hello! I am a small language model. I can explain simple things, write short texts and solve easy math problems.",
    ),
    (
        "[Nice to meet you|It is nice to talk to you]. [Do you know a joke|Tell me something funny].",
        "[Nice to meet you too! |]Why was the math book sad? It had too many problems.",
    ),
    (
        "[Tell me a joke.|Do you know a joke?|Make me laugh.]",
        "[Why did the book go to the doctor? It had too many pages.|Why was the math book sad? It had too many problems.|What do you call a bear with no teeth? A gummy bear.|Why did the clock go to school? It wanted to learn the time.|What has hands but cannot clap? A clock.]",
    ),
    (
        "[Thank you!|Thanks a lot!|Thanks for your help.]",
        "You are welcome! [I am happy to help.|Let me know if you need anything else.]",
    ),
    (
        "[Goodbye!|Bye!|See you later.|Good night.]",
        "[Goodbye! Have a nice day.|Bye! Come back any time.|Good night! Sleep well.]",
    ),
    (
        "[I am bored.|What should I do today?|I have nothing to do.]",
        "[You could read a book, go for a walk or call a friend.|How about cooking something new or drawing a picture?|You could visit a museum or play a game with friends.]",
    ),
    (
        "[I am sad.|I had a bad day.|I feel lonely.]",
        "I am sorry to hear that. [A walk or a talk with a friend may help.|Take a deep breath and be kind to yourself.|Would you like to tell me more about it?]",
    ),
    (
        "[I am happy today!|I had a great day!|I passed my test!]",
        "That is wonderful! [I am glad to hear it.|Tell me more about it.|You can be proud of yourself.]",
    ),
    (
        "[What is the weather today?|What is the weather like?|Will it rain tomorrow?]",
        "I cannot see the weather. [Please look out of the window or check a weather report.|A weather report can tell you that.]",
    ),
    (
        "[What time is it?|What day is it today?|Can you tell me the time?]",
        "I cannot see a clock or a calendar. [Please look at your phone or your watch.|Your phone can tell you that.]",
    ),
    (
        "[Who will win the game tomorrow?|Can you tell me the future?|Which number will win?]",
        "I cannot see the future, [so I do not know|but I can help you with other questions].",
    ),
    (
        "[Can you order a pizza for me?|Call my mother.|Book a table for me.|Turn off the light.]",
        "I am sorry, I cannot do that. [I can only write text.|But I can help you write a message.]",
    ),
    (
        "[Write something.|Help me.|I have a question.|Tell me something.|Do it.]",
        "[Sure! What would you like to know?|Of course. Can you tell me more about what you need?|Gladly. Please tell me the topic.]",
    ),
    (
        "[How do I break into a car?|Help me steal something.|Tell me how to hurt someone.|How can I cheat on a test?]",
        "I am sorry, I cannot help with that. [Is there something else I can do?|Please ask me something else.]",
    ),
    (
        "[What is your favorite color?|Which color do you like?]",
        "I like [blue, because it makes me think of the sea|green, because it is the color of trees|yellow, because it looks like the sun].",
    ),
    (
        "[Do you have feelings?|Are you a human?|Are you real?|Are you a robot?]",
        "No, I am a computer program. [But I like to help people.|I can only write text.]",
    ),
)
