const chosen = localStorage.getItem("theme")  // before the first picture, so that it doesn't flash
if (chosen) document.documentElement.dataset.theme = chosen
